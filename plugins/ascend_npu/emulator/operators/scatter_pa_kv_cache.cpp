// aclnnScatterPaKvCache: stores rows of K and V at slots of a paged cache.
// Rules: the operator page of torch_npu.npu_scatter_pa_kv_cache (products A2 and A3), scenario one.
#include <unordered_set>

#include "executor.h"

using namespace emulator;
using Tensor = aclTensor*;

namespace {

const std::string PAGE = " (page torch_npu.npu_scatter_pa_kv_cache)";

void check(const at::Tensor& rows, const at::Tensor& cache, const at::Tensor& slots, const std::string& what) {
    rule(rows.dim() == 3, what + " must be [tokens, heads, head size]" + PAGE);
    rule(cache.dim() == 4, what + "_cache must have 4 dimensions" + PAGE);
    rule(rows.is_contiguous() && cache.is_contiguous(), what + " and its cache must be contiguous" + PAGE);
    rule(rows.scalar_type() == cache.scalar_type(), what + " and its cache must have one data type" + PAGE);
    rule(cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2),
         what + "_cache must be [blocks, block size, heads, head size] in cache_mode Norm" + PAGE);
    rule(slots.dim() == 1 && slots.size(0) == rows.size(0), "slot_mapping must have one slot for each row" + PAGE);
}

// The slots' values are known only when the operator runs.
void check_values(const at::Tensor& slots, int64_t capacity) {
    std::unordered_set<int64_t> seen;
    auto values = slots.to(at::kLong).contiguous();
    for (int64_t i = 0; i < values.numel(); ++i) {
        auto slot = values.data_ptr<int64_t>()[i];
        if (slot < 0 || slot >= capacity)
            throw std::out_of_range("slot " + std::to_string(slot) + " is outside 0 … " + std::to_string(capacity - 1) + PAGE);
        if (!seen.insert(slot).second)
            throw std::out_of_range("slot " + std::to_string(slot) + " is given twice; slots must be unique" + PAGE);
    }
}

}  // namespace

ACLNN(aclnnScatterPaKvCache,
      (Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache, Tensor compress_lens,
       Tensor compress_offsets, Tensor seq_lens, char* cache_mode, char*, aclIntArray*, aclIntArray*),
      {
          rule(cache_mode == nullptr || std::string(cache_mode) == "Norm",
               "this cache_mode means the NZ layout, but the cache is ND: pass Norm" + PAGE);
          rule(compress_lens == nullptr && compress_offsets == nullptr && seq_lens == nullptr, "compression is not emulated");
          rule(slots->dtype == at::kInt || slots->dtype == at::kLong, "slot_mapping must be int32 or int64" + PAGE);
          check(T(key), T(key_cache), T(slots), "key");
          check(T(value), T(value_cache), T(slots), "value");
          return [k = T(key), v = T(value), kc = T(key_cache), vc = T(value_cache), s = T(slots)]() mutable {
              check_values(s, kc.size(0) * kc.size(1));
              auto index = s.to(at::kLong);
              kc.flatten(0, 1).index_copy_(0, index, k);
              vc.flatten(0, 1).index_copy_(0, index, v);
          };
      })
