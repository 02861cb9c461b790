// One call of the fused attention operator, with its arguments by name for both versions of the entry point.
#pragma once

#include "executor.h"

namespace emulator {

struct AttentionCall {
    at::Tensor q, k, v, mask, table, out, lse;
    at::Tensor q_rope, k_rope;  // rests of latent rows (MLA); undefined for other layers
    std::vector<int64_t> q_lens, kv_lens;  // as passed; the rules state their meaning
    int64_t num_heads = 0, num_kv_heads = 0;
    double scale = 1.0;
    int64_t pre_tokens = 0, next_tokens = 0;
    std::string layout;
    int64_t sparse_mode = 0, block_size = 0;
    bool wants_lse = false;

    bool paged() const { return table.defined(); }
    bool latent() const { return q_rope.defined() || k_rope.defined(); }
    bool packed() const { return layout == "TND"; }
    bool grouped() const { return num_heads != num_kv_heads; }
    int64_t head_dim() const { return packed() || layout == "BSND" ? q.size(-1) : q.size(-1) / num_heads; }
    int64_t requests() const { return packed() ? int64_t(q_lens.size()) : q.size(0); }
    // Query rows and keys of one request, in every layout.
    int64_t rows_of(int64_t request) const;
    int64_t keys_of(int64_t request) const;
};

// Raises Rejected with the rule's source: page, host code or call.
void check(const AttentionCall& call);

// Computes in float32 and rounds once to the output's type.
void compute(AttentionCall& call);

// Scratch memory for these lists, and the largest that any lists of this call need.
uint64_t workspace_of(const AttentionCall& call);
uint64_t max_workspace_of(const AttentionCall& call);

}  // namespace emulator
