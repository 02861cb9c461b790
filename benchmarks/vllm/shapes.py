"""Shapes of models without trained weights."""

from __future__ import annotations

from typing import Any

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 99,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
"""DeepSeek V3's latent attention. No layer has experts, except SGLang's MTP layer, which always has."""
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B-shape": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "Qwen-2.5-7B-shape": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
    },
    "Gemma-2-9B-shape": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "sliding_window": 4096,
        **CAPS,
        "query_pre_attn_scalar": 256,
    },
    "Qwen3-Next-shape": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
    },
    "DeepSeek-V3-shape": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 8,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        **LATENT,
    },
    "small-shape": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
    },
    "small-latent-shape": {
        "model_type": "deepseek_v3",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 512,
        "q_lora_rank": 256,
        **LATENT,
    },
    "small-windows-shape": {
        "model_type": "gemma2",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "sliding_window": 64,
        **CAPS,
        "query_pre_attn_scalar": 64,
    },
}
"""Fields of transformers' configurations. In Gemma 2 every other layer has the sliding window.

Qwen3-Next has half of the layers and an eighth of the experts of Qwen3-Next-80B-A3B, DeepSeek an eighth of the layers.
"""
SHAPES["DeepSeek-V3-4-layers"] = SHAPES["DeepSeek-V3-shape"] | {"num_hidden_layers": 4}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def attention_elements(shape: dict[str, Any]) -> int:
    """Return the number of weight elements of one attention layer."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    if "kv_lora_rank" not in shape:
        return int(2 * hidden * (heads + shape["num_key_value_heads"]) * shape["head_dim"])
    row, low, rope = shape["kv_lora_rank"], shape["q_lora_rank"], shape["qk_rope_head_dim"]
    nope, value = shape["qk_nope_head_dim"], shape["v_head_dim"]
    return int(hidden * (low + row + rope + heads * value) + heads * (low * (nope + rope) + row * (nope + value)))
