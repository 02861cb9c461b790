// Entry points of the fused attention operator on A2 and A3. torch_npu.npu_fused_infer_attention_score calls V3, and
// npu_fused_infer_attention_score_v2 calls V4. V5, for the next product, is not emulated.
#include "attention_call.h"

using namespace emulator;
using Tensor = aclTensor*;

// Arguments of both versions in their order: up to the scales of rope, and from the number of heads on.
#define INPUTS \
     Tensor query, aclTensorList* keys, aclTensorList* values, Tensor pse_shift, Tensor mask, aclIntArray* q_lens, \
     aclIntArray* kv_lens, Tensor dequant1, Tensor quant1, Tensor dequant2, Tensor quant2, Tensor offset2, Tensor \
     antiquant, Tensor antiquant_offset, Tensor table, Tensor query_padding, Tensor kv_padding, Tensor \
     key_antiquant, Tensor key_antiquant_offset, Tensor value_antiquant, Tensor value_antiquant_offset, Tensor \
     key_prefix, Tensor value_prefix, aclIntArray* prefix_len, Tensor query_rope, Tensor key_rope, Tensor key_rope_antiquant
#define SETTINGS \
     int64_t num_heads, double scale, int64_t pre_tokens, int64_t next_tokens, char* layout, int64_t num_kv_heads, \
     int64_t sparse_mode, int64_t inner_precise, int64_t block_size, int64_t antiquant_mode, bool wants_lse, \
     int64_t key_mode, int64_t value_mode
#define V3_PARAMETERS INPUTS, SETTINGS, Tensor out, Tensor lse
#define V4_PARAMETERS INPUTS, Tensor query_scale, Tensor sink, SETTINGS, int64_t query_mode, Tensor out, Tensor lse

static at::Tensor only(const aclTensorList* list) {
    rule(list->tensors.size() == 1, "a list of several keys is not emulated");
    return T(list->tensors[0]);
}

// A macro, because it uses the arguments above by name. MORE and QUERY_MODE are V4's additional arguments.
#define CALL(MORE, QUERY_MODE)                                                                                         \
    [&] {                                                                                                              \
        rule(prefix_len == nullptr && antiquant_mode == 0 && key_mode == 0 && value_mode == 0 && QUERY_MODE == 0,      \
             "quantised and shared keys are not emulated");                                                            \
        for (auto* one : {pse_shift, dequant1, quant1, dequant2, quant2, offset2, antiquant, antiquant_offset,         \
                          query_padding, kv_padding, key_antiquant, key_antiquant_offset, value_antiquant,             \
                          value_antiquant_offset, key_prefix, value_prefix, key_rope_antiquant, EMULATOR_UNPACK MORE}) \
            rule(one == nullptr, "quantisation, padding, shared prefixes and sinks are not emulated");                 \
        rule(inner_precise == 0, "inner_precise other than 0 is not emulated");                                        \
        AttentionCall call{T(query), only(keys), only(values), T(mask), T(table), T(out), T(lse), T(query_rope),       \
                           T(key_rope), I(q_lens), I(kv_lens), num_heads, num_kv_heads == 0 ? num_heads :              \
                           num_kv_heads, scale, pre_tokens, next_tokens, layout, sparse_mode, block_size, wants_lse};  \
        check(call);                                                                                                   \
        return call;                                                                                                   \
    }()

static Work prepared(AttentionCall call) {
    needs_workspace(workspace_of(call));
    return [call]() mutable { compute(call); };
}

// Query of the largest workspace for any later lists: it checks the rules and does no work.
static Work sized(const AttentionCall& call) {
    needs_workspace(max_workspace_of(call));
    return [] {};
}

#define ENTRY(NAME, PARAMETERS, MORE, QUERY_MODE)                                                            \
    ACLNN(NAME, (PARAMETERS), { return prepared(CALL(MORE, QUERY_MODE)); })                                  \
    API int NAME##GetMaxWorkspaceSize(PARAMETERS, uint64_t* size, aclOpExecutor** executor) {                \
        return prepare(#NAME, size, executor, [&]() -> Work { return sized(CALL(MORE, QUERY_MODE)); });      \
    }

ENTRY(aclnnFusedInferAttentionScoreV3, V3_PARAMETERS, (Tensor(nullptr)), 0)
ENTRY(aclnnFusedInferAttentionScoreV4, V4_PARAMETERS, (query_scale, sink), query_mode)
