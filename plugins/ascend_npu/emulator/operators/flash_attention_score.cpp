// aclnnFlashAttentionScore, which torch's scaled_dot_product_attention calls on an NPU. The plugin never calls it; the
// probe of a loaded model does. Page: torch_npu.npu_fusion_attention, BNSD.
#include "executor.h"

using namespace emulator;
using Tensor = aclTensor*;

namespace {

constexpr int64_t TRIANGLE = 2048;

// Masked keys, a bool that broadcasts to [B, N, S1, S2]; undefined without a mask.
at::Tensor hidden(const at::Tensor& mask, int64_t sparse_mode, int64_t rows, int64_t keys) {
    if (!mask.defined()) return {};
    if (sparse_mode == 0) return mask.to(at::kBool);
    rule(mask.dim() == 2 && mask.size(0) == TRIANGLE && mask.size(1) == TRIANGLE, "atten_mask must be 2048 × 2048 in sparse_mode 2");
    return at::ones({rows, keys}, at::kBool).triu(1);
}

struct Answer {
    at::Tensor out, high, sum;  // [B, N, S1, D], [B, N, S1, 1], [B, N, S1, 1]
};

Answer attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& hide, double scale) {
    auto group = q.size(1) / k.size(1);
    auto wide = [&](const at::Tensor& t) { return t.to(at::kFloat).repeat_interleave(group, 1); };
    auto scores = at::matmul(q.to(at::kFloat), wide(k).transpose(2, 3)) * scale;
    if (hide.defined()) scores.masked_fill_(hide, -INFINITY);
    auto high = scores.amax({-1}, true);
    auto weights = at::exp(scores - high);
    auto sum = weights.sum(-1, true);
    return {at::matmul(weights / sum, wide(v)), high, sum};
}

}  // namespace

ACLNN(aclnnFlashAttentionScore,
      (Tensor query, Tensor key, Tensor value, Tensor pse, Tensor drop, Tensor padding, Tensor mask, aclIntArray* prefix,
       double scale, double keep, int64_t, int64_t, int64_t heads, char* layout, int64_t, int64_t sparse_mode, Tensor high,
       Tensor sum, Tensor, Tensor out),
      {
          rule(std::string(layout) == "BNSD" && query->sizes.size() == 4, "only BNSD is emulated");
          rule(pse == nullptr && drop == nullptr && padding == nullptr && keep == 1.0, "dropout and biases are not emulated");
          rule(prefix == nullptr || prefix->values.empty(), "prefixes are not emulated");
          rule(sparse_mode == 0 || sparse_mode == 2, "sparse_mode other than 0 and 2 is not emulated");
          rule(heads == query->sizes[1] && heads % key->sizes[1] == 0, "query heads must be a multiple of key heads");
          auto hide = hidden(T(mask), sparse_mode, query->sizes[2], key->sizes[2]);
          return [=, q = T(query), k = T(key), v = T(value), o = T(out), h = T(high), s = T(sum)]() mutable {
              auto answer = attend(q, k, v, hide, scale);
              o.copy_(answer.out);
              h.copy_(answer.high.expand_as(h));
              s.copy_(answer.sum.expand_as(s));
          };
      })
