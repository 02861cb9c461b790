// One call of the fused attention operator, its arguments by name.
#pragma once

#include "executor.h"

namespace emulator {

struct AttentionCall {
    at::Tensor q, k, v, mask, table, out, lse;
    std::vector<int64_t> q_lens, kv_lens;  // as given: see the rules for what they count
    int64_t num_heads = 0, num_kv_heads = 0;
    double scale = 1.0;
    int64_t pre_tokens = 0, next_tokens = 0;
    std::string layout;
    int64_t sparse_mode = 0, block_size = 0;
    bool wants_lse = false;

    bool paged() const { return table.defined(); }
    bool packed() const { return layout == "TND"; }
};

// Raises Rejected, with the page or the call that the rule comes from.
void check(const AttentionCall& call);

// float32 inside, rounded to the output's type once.
void compute(AttentionCall& call);

}  // namespace emulator
