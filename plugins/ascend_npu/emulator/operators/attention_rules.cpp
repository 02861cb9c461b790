// Rules of the fused attention operator. PAGE: torch_npu.npu_fused_infer_attention_score, products A2 and A3.
// HOST: checks in the public host code of CANN 8.5 to 9.1, where they are narrower or wider than the page.
// CALLS: vllm-ascend 0.23, attention/attention_v1.py. MLA: its calls with query_rope and key_rope, attention/mla_v1.py.
#include "attention_call.h"

namespace emulator {

namespace {

constexpr int64_t TRIANGLE = 2048;
constexpr int64_t PACKED_DIM = 256, PADDED_DIM = 512;
constexpr int64_t PACKED_BLOCK = 512;
constexpr int64_t LATENT_DIM = 512, LATENT_REST = 64, LATENT_BLOCK = 128, LATENT_ROWS = 16, LATENT_HEADS = 128;

std::string page(const std::string& section) { return " (page npu_fused_infer_attention_score, " + section + ")"; }
std::string mla(const std::string& what) { return " (vllm-ascend, mla_v1, " + what + ")"; }
std::string host(const std::string& what) { return " (CANN 8.5 to 9.1, " + what + ")"; }

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
    rule(c.num_heads % c.num_kv_heads == 0 && (c.latent() || c.num_heads / c.num_kv_heads <= 64),
         "num_heads must be a multiple of num_key_value_heads, at most 64 times it" + page("num_key_value_heads"));
    if (c.wants_lse) rule(c.lse.scalar_type() == at::kFloat, "softmax_lse must be float32" + page("softmax_lse"));
}

void check_head_dim(const AttentionCall& c, int64_t dim) {
    auto size = "head size " + std::to_string(dim);
    if (!c.packed()) {
        rule(dim <= PADDED_DIM && dim % 16 == 0, size + ", but a padded layout takes multiples of 16 to 512" + host("Q_S > 1"));
    } else if (c.grouped()) {
        rule(dim <= PACKED_DIM && dim % 16 == 0, size + ", but TND with grouped heads takes multiples of 16 to 256" + host("TND, grouped"));
    } else {
        rule(one_of(dim, {64, 128, 192}), size + ", but TND without grouped heads takes 64, 128 or 192" + host("TND, not grouped"));
    }
}

void check_layout(const AttentionCall& c) {
    rule(c.layout == "TND" || c.layout == "BSND" || c.layout == "BSH", "input_layout " + c.layout + " is not emulated");
    if (c.packed()) rule(c.q.dim() == 3 && c.q.size(1) == c.num_heads, "a TND query is [T, num_heads, D]" + page("input_layout"));
    else rule(c.q.dim() == (c.layout == "BSND" ? 4 : 3), "the query does not have the dimensions of its layout" + page("input_layout"));
    if (!c.latent()) check_head_dim(c, c.head_dim());
    auto width = c.paged() && c.k.dim() == 3 ? c.k.size(2) : c.k.size(-1) * (c.layout == "BSH" ? 1 : c.num_kv_heads);
    rule(width == c.num_kv_heads * c.head_dim(), "keys and queries must have one head size" + page("general limits"));
}

void check_increasing(const std::vector<int64_t>& sums, const std::string& name) {
    int64_t before = 0;
    for (auto one : sums) {
        rule(one >= before, name + " must not decrease in TND: it is a running sum" + page("actual_seq_lengths"));
        before = one;
    }
}

void check_packed_lengths(const AttentionCall& c) {
    rule(!c.q_lens.empty() && !c.kv_lens.empty(), "both length lists must be given in TND" + page("TND limits"));
    rule(c.q_lens.size() == c.kv_lens.size(), "both length lists must have one entry for each request" + page("TND limits"));
    rule(c.q_lens.size() <= 4096, "at most 4096 requests in TND" + page("TND limits"));
    check_increasing(c.q_lens, "actual_seq_lengths");
    rule(c.q_lens.back() == c.q.size(0), "actual_seq_lengths ends at " + std::to_string(c.q_lens.back()) + ", but the query has " +
                                             std::to_string(c.q.size(0)) + " rows (CALLS pad the batch until both agree)");
    if (!c.paged()) check_increasing(c.kv_lens, "actual_seq_lengths_kv");
}

void check_padded_lengths(const AttentionCall& c) {
    if (c.paged()) rule(!c.kv_lens.empty(), "actual_seq_lengths_kv must be given with a block table" + page("PageAttention"));
    for (const auto* list : {&c.q_lens, &c.kv_lens})
        rule(list->empty() || list->size() == 1 || int64_t(list->size()) == c.q.size(0),
             "a length list has one entry, or one for each request" + page("actual_seq_lengths"));
    for (auto one : c.q_lens) rule(one >= 0 && one <= c.q.size(1), "actual_seq_lengths passes Q_S" + page("actual_seq_lengths"));
    if (!c.paged())
        for (auto one : c.kv_lens) rule(one <= c.k.size(1), "actual_seq_lengths_kv passes KV_S" + page("actual_seq_lengths_kv"));
}

void check_lengths(const AttentionCall& c) {
    if (c.packed()) check_packed_lengths(c);
    else check_padded_lengths(c);
    for (auto one : c.kv_lens) rule(one >= 0, "a length is negative" + page("actual_seq_lengths_kv"));
}

void check_table(const AttentionCall& c) {
    rule(c.table.scalar_type() == at::kInt && c.table.dim() == 2, "block_table must be int32 [requests, blocks]" + page("block_table"));
    rule(c.table.size(0) == c.requests(),
         "block_table has " + std::to_string(c.table.size(0)) + " rows for " + std::to_string(c.requests()) + " requests" + page("block_table"));
    // A device reads past the row: CANN's TND kernel has no such check.
    for (auto length : c.kv_lens)
        rule((length + c.block_size - 1) / c.block_size <= c.table.size(1),
             "block_table has " + std::to_string(c.table.size(1)) + " columns, but a request of " + std::to_string(length) +
                 " tokens needs " + std::to_string((length + c.block_size - 1) / c.block_size) + page("block_table") + ", sglang#22778");
}

void check_pages(const AttentionCall& c) {
    // PAGE forbids TND with pages in one section and limits its block size in another. HOST accepts it, CALLS use 128.
    if (c.packed())
        rule(c.block_size > 0 && c.block_size % 16 == 0 && c.block_size <= PACKED_BLOCK,
             "block_size in TND is a multiple of 16, at most 512" + host("TND; vllm-ascend 0.23 pages TND with 128"));
    else
        rule(c.block_size >= 128 && c.block_size <= 512 && c.block_size % 128 == 0, "block_size is 128, 256, 384 or 512" + page("block_size"));
    bool flat = c.k.dim() == 3 && c.k.size(1) == c.block_size;
    bool by_head = c.k.dim() == 4 && c.k.size(1) == c.num_kv_heads && c.k.size(2) == c.block_size;
    rule(flat || by_head, "a paged key is [blocks, block_size, heads · D] or [blocks, heads, block_size, D]" + page("PageAttention"));
    rule(!flat || c.k.size(2) <= 65535, "heads · D of a paged key is at most 65535" + page("PageAttention"));
    check_table(c);
}

void check_triangle_use(const AttentionCall& c) {
    rule(c.mask.numel() == TRIANGLE * TRIANGLE && c.mask.size(-1) == TRIANGLE, "atten_mask must be 2048 × 2048 in sparse_mode 2 … 4" + page("atten_mask"));
    if (c.packed()) rule(c.sparse_mode != 2, "sparse_mode in TND is 0, 3 or 4" + host("TND"));
    // CANN's older path refuses fewer keys than rows. The newer path has no check, and its rows would see no key.
    for (int64_t r = 0; c.sparse_mode >= 3 && r < c.requests(); ++r)
        rule(c.rows_of(r) == 0 || c.keys_of(r) >= c.rows_of(r),
             "a request has " + std::to_string(c.keys_of(r)) + " keys for " + std::to_string(c.rows_of(r)) + " rows in sparse_mode 3 or 4" + host("older path"));
}

// Shape [Q, S], [1 or B, Q, S] or [1 or B, 1, Q, S]. For alignment Q and S may exceed the rows and keys.
void check_dense(const AttentionCall& c) {
    rule(!c.packed(), "TND takes no full atten_mask; only BSH, BSND and BNSD do" + page("atten_mask"));
    rule(!c.paged(), "a full atten_mask over pages would span the whole block table; it is not emulated");
    auto dims = c.mask.dim();
    bool batched = dims == 2 || c.mask.size(0) == 1 || c.mask.size(0) == c.q.size(0);
    rule(dims >= 2 && dims <= 4 && batched && (dims < 4 || c.mask.size(1) == 1), "a full atten_mask is [B, 1, Q_S, KV_S]" + page("atten_mask"));
    rule(c.mask.size(-2) >= c.q.size(1) && c.mask.size(-1) >= c.k.size(1), "atten_mask must cover Q_S × KV_S" + page("atten_mask"));
}

// Latent rows: keys and values are one buffer of value parts; query_rope and key_rope have the rests.
void check_latent(const AttentionCall& c) {
    rule(c.q_rope.defined() && c.k_rope.defined(), "query_rope and key_rope must be given together" + mla("rope"));
    rule(c.packed() && c.paged(), "rope inputs are emulated in TND over pages only" + mla("input_layout"));
    for (const auto* one : {&c.q_rope, &c.k_rope})
        rule(one->is_contiguous() && one->scalar_type() == c.q.scalar_type(), "rope inputs are contiguous, of the query's type" + mla("rope"));
    rule(c.num_kv_heads == 1 && c.num_heads <= LATENT_HEADS && (c.num_heads & (c.num_heads - 1)) == 0,
         std::to_string(c.num_heads) + " query heads, but one KV head takes a power of two up to 128" + mla("num_heads, #9560"));
    rule(c.q.size(2) == LATENT_DIM && c.q_rope.size(-1) == LATENT_REST, "a latent query is 512 and 64 wide" + mla("query"));
    rule(c.q_rope.size(0) == c.q.size(0) && c.q_rope.size(1) == c.num_heads, "query_rope is [T, num_heads, 64]" + mla("query_rope"));
    rule(c.k.dim() == 4 && c.k_rope.dim() == 4 && c.k.size(0) == c.k_rope.size(0) && c.k_rope.size(3) == LATENT_REST &&
             c.k_rope.size(2) == c.k.size(2),
         "a paged latent key is [blocks, 1, block, 512] and [blocks, 1, block, 64]" + mla("key"));
    rule(c.k.data_ptr() == c.v.data_ptr(), "key and value are the same buffer" + mla("value"));
    rule(c.block_size == LATENT_BLOCK, "block_size of latent rows is 128" + mla("block_size"));
    rule(c.sparse_mode == 0 || c.sparse_mode == 3, "sparse_mode of latent rows is 0 or 3" + mla("sparse_mode"));
    rule(c.sparse_mode == 3 || !c.mask.defined(), "latent rows take no full atten_mask" + mla("atten_mask"));
    for (int64_t r = 0; r < c.requests(); ++r)
        rule(c.rows_of(r) <= LATENT_ROWS, "a request has " + std::to_string(c.rows_of(r)) + " rows, but TND takes 16 of latent rows" + mla("TND"));
}

void check_mask(const AttentionCall& c) {
    rule(one_of(c.sparse_mode, {0, 1, 2, 3, 4}), "sparse_mode must be 0 … 4" + page("sparse_mode"));
    if (c.sparse_mode >= 1) rule(c.mask.defined(), "sparse_mode 1 … 4 needs atten_mask" + page("sparse_mode"));
    if (!c.mask.defined()) return;
    auto type = c.mask.scalar_type();
    rule(type == at::kBool || type == at::kChar || type == at::kByte, "atten_mask must be bool, int8 or uint8" + page("atten_mask"));
    if (c.sparse_mode >= 2) check_triangle_use(c);
    else check_dense(c);
}

}  // namespace

void check(const AttentionCall& c) {
    check_tensors(c);
    check_layout(c);
    check_lengths(c);
    if (c.latent()) check_latent(c);
    if (c.paged()) check_pages(c);
    check_mask(c);
}

}  // namespace emulator
