// What the fused attention operator accepts. PAGE: torch_npu.npu_fused_infer_attention_score, products A2 and A3.
// CALLS: vllm-ascend 0.23, attention/attention_v1.py. Where both speak and differ, what is called is accepted.
#include "attention_call.h"

namespace emulator {

namespace {

constexpr int64_t TRIANGLE = 2048;

std::string page(const std::string& section) { return " (page npu_fused_infer_attention_score, " + section + ")"; }

bool one_of(int64_t value, std::initializer_list<int64_t> allowed) {
    for (auto one : allowed)
        if (value == one) return true;
    return false;
}

void check_tensors(const AttentionCall& c) {
    rule(c.q.scalar_type() == at::kHalf || c.q.scalar_type() == at::kBFloat16,
         "query must be float16 or bfloat16" + page("query"));
    rule(c.k.scalar_type() == c.q.scalar_type() && c.v.scalar_type() == c.q.scalar_type() && c.out.scalar_type() == c.q.scalar_type(),
         "query, key, value and output must have one data type" + page("key, value"));
    for (const auto* one : {&c.q, &c.k, &c.v, &c.mask, &c.table})
        rule(!one->defined() || one->is_contiguous(), "every tensor must be contiguous" + page("query, key, value, atten_mask"));
    rule(c.k.sizes() == c.v.sizes(), "key and value must have one shape" + page("general limits"));
    rule(c.num_heads >= 1 && c.num_heads <= 256 && c.num_kv_heads >= 1 && c.num_kv_heads <= 256, "1 … 256 heads" + page("axes"));
    rule(c.num_heads % c.num_kv_heads == 0 && c.num_heads / c.num_kv_heads <= 64,
         "num_heads must be a multiple of num_key_value_heads, at most 64 times it" + page("num_key_value_heads"));
}

void check_layout(const AttentionCall& c) {
    rule(c.layout == "TND" || c.layout == "BSND" || c.layout == "BSH", "input_layout " + c.layout + " is not emulated");
    int64_t dim = c.packed() || c.layout == "BSND" ? c.q.size(-1) : c.q.size(-1) / c.num_heads;
    if (c.packed()) {
        rule(c.q.dim() == 3 && c.q.size(1) == c.num_heads, "a TND query is [T, num_heads, D]" + page("input_layout"));
        rule(dim == 128 || dim == 192, "head size " + std::to_string(dim) + " in TND, where 128 and 192 are served" + page("TND limits"));
    } else {
        rule(c.q.dim() == (c.layout == "BSND" ? 4 : 3), "the query does not have the dimensions of its layout" + page("input_layout"));
        rule(dim <= 512 && dim * 2 % 16 == 0, "head size must be a multiple of 16 bytes, at most 512" + page("Q_S > 1"));
    }
}

void check_increasing(const std::vector<int64_t>& sums, const std::string& name) {
    int64_t before = 0;
    for (auto one : sums) {
        rule(one >= before, name + " must not decrease in TND: it is a running sum" + page("actual_seq_lengths"));
        before = one;
    }
}

void check_lengths(const AttentionCall& c) {
    if (!c.packed()) {
        if (c.paged()) rule(!c.kv_lens.empty(), "actual_seq_lengths_kv must be given with a block table" + page("PageAttention"));
        return;
    }
    rule(!c.q_lens.empty() && !c.kv_lens.empty(), "both length lists must be given in TND" + page("TND limits"));
    rule(c.q_lens.size() == c.kv_lens.size(), "both length lists must have one entry for each request" + page("TND limits"));
    rule(c.q_lens.size() <= 4096, "at most 4096 requests in TND" + page("TND limits"));
    check_increasing(c.q_lens, "actual_seq_lengths");
    rule(c.q_lens.back() == c.q.size(0), "actual_seq_lengths ends at " + std::to_string(c.q_lens.back()) + ", but the query has " +
                                             std::to_string(c.q.size(0)) + " rows (CALLS pad the batch until both agree)");
    if (!c.paged()) check_increasing(c.kv_lens, "actual_seq_lengths_kv");
    for (auto one : c.kv_lens) rule(one >= 0, "a length is negative" + page("actual_seq_lengths_kv"));
}

void check_pages(const AttentionCall& c) {
    rule(c.table.scalar_type() == at::kInt && c.table.dim() == 2, "block_table must be int32 [requests, blocks]" + page("block_table"));
    rule(c.table.size(0) == int64_t(c.kv_lens.size()),
         "block_table has " + std::to_string(c.table.size(0)) + " rows for " + std::to_string(c.kv_lens.size()) + " requests" + page("block_table"));
    // PAGE forbids TND with pages in one section and limits its block size in another; CALLS use it with 128.
    if (c.packed())
        rule(c.block_size > 0 && c.block_size % 16 == 0 && c.block_size <= 1024,
             "block_size in TND is a multiple of 16, at most 1024" + page("TND limits; vllm-ascend 0.23 pages TND with 128"));
    else
        rule(c.block_size >= 128 && c.block_size <= 512 && c.block_size % 128 == 0, "block_size is 128, 256, 384 or 512" + page("block_size"));
    // PAGE: [blocks, block, heads · D] for every layout. CALLS: so in TND too.
    rule(c.k.dim() == 3 && c.k.size(1) == c.block_size, "a paged key is [blocks, block_size, heads · D]" + page("PageAttention; vllm-ascend 0.23 does so in TND too"));
    rule(c.k.size(2) % c.num_kv_heads == 0 && c.k.size(2) <= 65535, "heads · D of a paged key is at most 65535" + page("PageAttention"));
    for (auto length : c.kv_lens)
        rule((length + c.block_size - 1) / c.block_size <= c.table.size(1),
             "block_table has " + std::to_string(c.table.size(1)) + " columns, but a request of " + std::to_string(length) +
                 " tokens needs " + std::to_string((length + c.block_size - 1) / c.block_size) + page("block_table") + ", sglang#22778");
}

void check_mask(const AttentionCall& c) {
    rule(one_of(c.sparse_mode, {0, 1, 2, 3, 4}), "sparse_mode must be 0 … 4" + page("sparse_mode"));
    if (c.sparse_mode >= 1) rule(c.mask.defined(), "sparse_mode 1 … 4 needs atten_mask" + page("sparse_mode"));
    if (!c.mask.defined()) return;
    auto type = c.mask.scalar_type();
    rule(type == at::kBool || type == at::kChar || type == at::kByte, "atten_mask must be bool, int8 or uint8" + page("atten_mask"));
    if (c.sparse_mode >= 2) {
        rule(c.mask.numel() == TRIANGLE * TRIANGLE && c.mask.size(-1) == TRIANGLE, "atten_mask must be 2048 × 2048 in sparse_mode 2 … 4" + page("atten_mask"));
        return;
    }
    rule(!c.packed(), "TND takes no full atten_mask; only BSH, BSND and BNSD do" + page("atten_mask"));
    rule(!c.paged(), "a full atten_mask over pages would span the whole block table; it is not emulated");
    rule(c.mask.dim() == 4 && c.mask.size(1) == 1 && (c.mask.size(0) == c.q.size(0) || c.mask.size(0) == 1),
         "a full atten_mask is [B, 1, Q_S, KV_S]" + page("atten_mask"));
    rule(c.mask.size(2) == c.q.size(1) && c.mask.size(3) == c.k.size(1), "atten_mask must cover Q_S × KV_S" + page("atten_mask"));
}

}  // namespace

void check(const AttentionCall& c) {
    check_tensors(c);
    check_layout(c);
    check_lengths(c);
    if (c.paged()) check_pages(c);
    check_mask(c);
    if (c.wants_lse) rule(c.lse.scalar_type() == at::kFloat, "softmax_lse must be float32" + page("softmax_lse"));
}

}  // namespace emulator
