// Meaning of the length lists, and scratch memory that they need.
#include "attention_call.h"

#include <algorithm>

namespace emulator {

static int64_t listed(const std::vector<int64_t>& list, int64_t request) { return list[list.size() == 1 ? 0 : request]; }

// In TND rows are a running sum. In other layouts the list has one number per request, one for all, or none.
int64_t AttentionCall::rows_of(int64_t request) const {
    if (packed()) return q_lens[request] - (request == 0 ? 0 : q_lens[request - 1]);
    return q_lens.empty() ? q.size(1) : listed(q_lens, request);
}

// With pages the list has each request's keys in every layout. Packed keys without pages are a running sum.
int64_t AttentionCall::keys_of(int64_t request) const {
    if (packed() && !paged()) return kv_lens[request] - (request == 0 ? 0 : kv_lens[request - 1]);
    return kv_lens.empty() ? k.size(1) : listed(kv_lens, request);
}

// A small model of CANN 9.1's sizes: a base, plus memory if the lists lead to a split over keys (many keys, few rows, few
// tasks). So a workspace for other lists can be too small, as on a device.
constexpr uint64_t BASE = 1 << 20;
constexpr uint64_t TILE = 64 << 10;
constexpr int64_t CORES = 24, LONG = 1024, FEW_ROWS = 16, STACK = 512;

uint64_t max_workspace_of(const AttentionCall&) { return BASE + CORES * TILE; }

uint64_t workspace_of(const AttentionCall& call) {
    int64_t tiles = 0;
    for (int64_t r = 0; r < call.requests(); ++r) {
        auto keys = call.keys_of(r);
        if (keys >= LONG && call.rows_of(r) <= FEW_ROWS) tiles += (keys + STACK - 1) / STACK;
    }
    return BASE + std::min(tiles, CORES) * TILE;
}

}  // namespace emulator
