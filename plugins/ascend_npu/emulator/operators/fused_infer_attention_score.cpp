// aclnnFusedInferAttentionScoreV3, what torch_npu.npu_fused_infer_attention_score calls on A2 and A3.
#include "attention_call.h"

using namespace emulator;
using Tensor = aclTensor*;

// The operator asks for scratch memory, so that a call without one, or with one that is too small, is found.
constexpr uint64_t WORKSPACE = 1 << 20;

#define PARAMETERS \
     Tensor query, aclTensorList* keys, aclTensorList* values, Tensor pse_shift, Tensor mask, aclIntArray* q_lens, \
     aclIntArray* kv_lens, Tensor dequant1, Tensor quant1, Tensor dequant2, Tensor quant2, Tensor offset2, Tensor \
     antiquant, Tensor antiquant_offset, Tensor table, Tensor query_padding, Tensor kv_padding, Tensor \
     key_antiquant, Tensor key_antiquant_offset, Tensor value_antiquant, Tensor value_antiquant_offset, Tensor \
     key_prefix, Tensor value_prefix, aclIntArray* prefix_len, Tensor query_rope, Tensor key_rope, Tensor \
     key_rope_antiquant, int64_t num_heads, double scale, int64_t pre_tokens, int64_t next_tokens, char* layout, \
     int64_t num_kv_heads, int64_t sparse_mode, int64_t inner_precise, int64_t block_size, int64_t antiquant_mode, \
     bool wants_lse, int64_t key_mode, int64_t value_mode, Tensor out, Tensor lse

static AttentionCall call_of(Tensor query, aclTensorList* keys, aclTensorList* values) {
    rule(keys->tensors.size() == 1 && values->tensors.size() == 1, "a list of several keys is not emulated");
    AttentionCall call;
    call.q = T(query);
    call.k = T(keys->tensors[0]);
    call.v = T(values->tensors[0]);
    return call;
}

ACLNN_WITH_WORKSPACE(
    aclnnFusedInferAttentionScoreV3, WORKSPACE,
    (PARAMETERS),
    {
        rule(prefix_len == nullptr && antiquant_mode == 0 && key_mode == 0 && value_mode == 0, "quantised and shared keys are not emulated");
        for (auto* one : {pse_shift, dequant1, quant1, dequant2, quant2, offset2, antiquant, antiquant_offset, query_padding,
                          kv_padding, key_antiquant, key_antiquant_offset, value_antiquant, value_antiquant_offset, key_prefix,
                          value_prefix, query_rope, key_rope, key_rope_antiquant})
            rule(one == nullptr, "quantisation, padding, shared prefixes and rope inputs are not emulated");
        rule(inner_precise == 0, "inner_precise other than 0 is not emulated");
        auto call = call_of(query, keys, values);
        call.mask = T(mask);
        call.table = T(table);
        call.out = T(out);
        call.lse = T(lse);
        call.q_lens = I(q_lens);
        call.kv_lens = I(kv_lens);
        call.num_heads = num_heads;
        call.num_kv_heads = num_kv_heads == 0 ? num_heads : num_kv_heads;
        call.scale = scale;
        call.pre_tokens = pre_tokens;
        call.next_tokens = next_tokens;
        call.layout = layout;
        call.sparse_mode = sparse_mode;
        call.block_size = block_size;
        call.wants_lse = wants_lse;
        check(call);
        return [call]() mutable { compute(call); };
    })

// The largest workspace of any later lists: the same rules, no work.
API int aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize(PARAMETERS, uint64_t* size, aclOpExecutor** executor) {
    return aclnnFusedInferAttentionScoreV3GetWorkspaceSize(
     query, keys, values, pse_shift, mask, q_lens, kv_lens, dequant1, quant1, dequant2, quant2, offset2, antiquant,
     antiquant_offset, table, query_padding, kv_padding, key_antiquant, key_antiquant_offset, value_antiquant,
     value_antiquant_offset, key_prefix, value_prefix, prefix_len, query_rope, key_rope, key_rope_antiquant,
     num_heads, scale, pre_tokens, next_tokens, layout, num_kv_heads, sparse_mode, inner_precise, block_size,
     antiquant_mode, wants_lse, key_mode, value_mode, out, lse, size, executor);
}
