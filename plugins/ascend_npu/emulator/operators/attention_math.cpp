// Attention as its page defines it, one request at a time, in float32. It has no notion of drafts, prefixes or trees.
#include "attention_call.h"

namespace emulator {

namespace {

// Keys or values of one request from its pages, [blocks, block, heads · D] or [blocks, heads, block, D]: [length, heads, D].
at::Tensor gather(const AttentionCall& c, const at::Tensor& cache, int64_t request, int64_t length) {
    auto blocks = (length + c.block_size - 1) / c.block_size;
    auto ids = c.table[request].slice(0, 0, blocks).to(at::kLong);
    if (blocks > 0 && (ids.min().item<int64_t>() < 0 || ids.max().item<int64_t>() >= cache.size(0)))
        throw std::out_of_range("block_table names a block outside the cache of " + std::to_string(cache.size(0)));
    auto pages = cache.index_select(0, ids);
    if (pages.dim() == 4) pages = pages.permute({0, 2, 1, 3}).flatten(2);
    auto rows = pages.flatten(0, 1).slice(0, 0, length);
    return rows.reshape({length, c.num_kv_heads, rows.size(1) / c.num_kv_heads});
}

// The page: "The user must ensure a triangle" of ones above the diagonal. A corner and the last row rule out poison and
// zeros.
void check_triangle(const at::Tensor& mask) {
    constexpr int64_t CORNER = 128;
    auto whole = mask.view({mask.size(-2), mask.size(-1)});
    auto corner = whole.slice(0, 0, CORNER).slice(1, 0, CORNER).to(at::kBool);
    bool triangle = corner.equal(at::ones({CORNER, CORNER}, at::kBool).triu(1)) && !whole[-1].any().item<bool>();
    if (!triangle) throw std::invalid_argument("atten_mask of sparse_mode 2 … 4 must be a triangle of ones above the diagonal");
}

// The dense mask of one request: [rows, keys].
at::Tensor dense(const at::Tensor& mask, int64_t request, int64_t rows, int64_t keys) {
    auto one = mask;
    while (one.dim() > 2) one = one[one.dim() == mask.dim() && one.size(0) > 1 ? request : 0];
    return one.slice(0, 0, rows).slice(1, 0, keys);
}

// Keys that each row sees, bool [rows, keys]; undefined if all rows see all keys.
at::Tensor visible(const AttentionCall& c, int64_t request, int64_t rows, int64_t keys) {
    if (!c.mask.defined()) return {};
    if (c.sparse_mode <= 1) return dense(c.mask, request, rows, keys).to(at::kBool).logical_not();
    check_triangle(c.mask);
    auto shift = c.sparse_mode == 2 ? 0 : keys - rows;
    auto row = at::arange(rows).unsqueeze(1) + shift, key = at::arange(keys).unsqueeze(0);
    if (c.sparse_mode != 4) return key.le(row);
    return key.le(row + c.next_tokens).logical_and(key.ge(row - c.pre_tokens));
}

struct Answer {
    at::Tensor out, lse;  // [rows, heads, D] and [rows, heads], float32
};

// The two parts of latent rows side by side: a product over both is the sum of the products over each.
at::Tensor joined(const at::Tensor& part, const at::Tensor& rest) { return rest.defined() ? at::cat({part, rest}, -1) : part; }

Answer attend(const AttentionCall& c, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& seen) {
    auto rows = q.size(0), dim = v.size(2), group = c.num_heads / c.num_kv_heads;
    // Without keys CANN's packed kernel returns 0, and +inf for the log-sum-exp, which the page does not mention.
    if (k.size(0) == 0) return {at::zeros({rows, c.num_heads, dim}, at::kFloat), at::full({rows, c.num_heads}, INFINITY)};
    auto heads_first = [&](const at::Tensor& t) { return t.to(at::kFloat).permute({1, 0, 2}).repeat_interleave(group, 0); };
    auto scores = at::matmul(q.to(at::kFloat).permute({1, 0, 2}), heads_first(k).transpose(1, 2)) * c.scale;
    if (seen.defined()) scores.masked_fill_(seen.logical_not(), -INFINITY);
    auto lse = at::logsumexp(scores, -1);
    auto out = at::matmul(at::softmax(scores, -1), heads_first(v));
    return {out.permute({1, 0, 2}).reshape({rows, c.num_heads, dim}), lse.permute({1, 0})};
}

void compute_packed(AttentionCall& c) {
    int64_t first = 0, first_key = 0;
    for (int64_t r = 0; r < c.requests(); ++r) {
        auto rows = c.rows_of(r), keys = c.keys_of(r);
        auto of = [&](const at::Tensor& t) { return c.paged() ? gather(c, t, r, keys) : t.slice(0, first_key, first_key + keys); };
        if (rows > 0) {
            auto mine = [&](const at::Tensor& t) { return t.defined() ? t.slice(0, first, first + rows) : t; };
            auto rest = c.k_rope.defined() ? of(c.k_rope) : at::Tensor();
            auto answer = attend(c, joined(mine(c.q), mine(c.q_rope)), joined(of(c.k), rest), of(c.v), visible(c, r, rows, keys));
            c.out.slice(0, first, first + rows).copy_(answer.out);
            if (c.wants_lse) c.lse.slice(0, first, first + rows).copy_(answer.lse.unsqueeze(-1));
        }
        first += rows;
        first_key += keys;
    }
}

// Rows past a request's length are not written.
void compute_padded(AttentionCall& c) {
    for (int64_t r = 0; r < c.requests(); ++r) {
        auto rows = c.rows_of(r), keys = c.keys_of(r);
        if (rows == 0) continue;
        auto heads = [&](const at::Tensor& t) { return t.slice(0, 0, keys).reshape({keys, c.num_kv_heads, c.head_dim()}); };
        auto of = [&](const at::Tensor& t) { return c.paged() ? gather(c, t, r, keys) : heads(t[r]); };
        auto q = c.q[r].slice(0, 0, rows).reshape({rows, c.num_heads, c.head_dim()});
        auto answer = attend(c, q, of(c.k), of(c.v), visible(c, r, rows, keys));
        auto out = c.out[r].slice(0, 0, rows);
        out.copy_(answer.out.reshape(out.sizes()));
        if (c.wants_lse) c.lse[r].slice(1, 0, rows).copy_(answer.lse.permute({1, 0}).unsqueeze(-1));
    }
}

}  // namespace

void compute(AttentionCall& c) {
    if (c.packed()) compute_packed(c);
    else compute_padded(c);
}

}  // namespace emulator
