"""Shapes of models without trained weights."""

from __future__ import annotations

from typing import Any

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
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
"""Fields of transformers' configurations. In Gemma 2 every other layer has the sliding window."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gemma2": "Gemma2ForCausalLM"}
