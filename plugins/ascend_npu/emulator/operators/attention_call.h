// One call of the fused attention operator, its arguments by name, whichever version of the entry point brought them.
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
    bool grouped() const { return num_heads != num_kv_heads; }
    int64_t head_dim() const { return packed() || layout == "BSND" ? q.size(-1) : q.size(-1) / num_heads; }
    int64_t requests() const { return packed() ? int64_t(q_lens.size()) : q.size(0); }
    // Query rows and keys of one request, whatever the lists count in this layout.
    int64_t rows_of(int64_t request) const;
    int64_t keys_of(int64_t request) const;
};

// Raises Rejected, with the page, the source or the call that the rule comes from.
void check(const AttentionCall& call);

// float32 inside, rounded to the output's type once.
void compute(AttentionCall& call);

// Scratch memory for these lists, and the most that any lists of the same call need.
uint64_t workspace_of(const AttentionCall& call);
uint64_t max_workspace_of(const AttentionCall& call);

}  // namespace emulator
