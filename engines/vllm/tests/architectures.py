"""Decoders of many families, tiny and with random weights: a family's name, transformers' name of it, and its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USUAL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOW = {"sliding_window": 32}


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        kind: transformers' `model_type`.
        config: what differs from `USUAL`.
        weights: False where nothing is loaded, since it is refused.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    weights: bool = True

    def write(self, folder: Path, name: str) -> str:
        """Write it to a folder of its own, once."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path = folder / name
        if not (path / "config.json").exists():
            torch.manual_seed(0)
            config = AutoConfig.for_model(self.kind, **{**USUAL, **self.config})
            if self.weights:
                AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(path)
            else:
                config.save_pretrained(path)
        return str(path)


def heads(queries: int, keys: int, head_dim: int, **more: Any) -> Family:
    """A Qwen 3 of some heads."""
    shape = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": head_dim}
    return Family("qwen3", {**shape, **more})


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2", {"use_sliding_window": False}),
    "qwen2-window": Family("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": Family("qwen3"),
    "qwen3-moe": Family("qwen3_moe", EXPERTS),
    "qwen2-moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "mixtral": Family("mixtral", EXPERTS),
    "olmoe": Family("olmoe", EXPERTS),
    "gemma": Family("gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": Family("gemma2", {**WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}),
    "gemma3": Family("gemma3_text", {**WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
    "mistral": Family("mistral", WINDOW),
    "ministral": Family("ministral", WINDOW),
    "phi": Family("phi", {"partial_rotary_factor": 0.5}),
    "phi3": Family("phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "phi3-window": Family("phi3", WINDOW),
    "neox": Family("gpt_neox", {"rotary_pct": 0.25, "hidden_size": 256}),
    "gptj": Family("gptj", {"rotary_dim": 16}),
    "gpt2": Family("gpt2"),
    "gpt-bigcode": Family("gpt_bigcode", {"multi_query": True, "num_key_value_heads": 1}),
    "opt": Family("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "starcoder2": Family("starcoder2", WINDOW),
    "stablelm": Family("stablelm"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", {**WINDOW, "num_hidden_layers": 4}),
    "cohere": Family("cohere"),
    "cohere2": Family("cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "granite": Family("granite", {"attention_multiplier": 0.2}),
    "granite-moe": Family("granitemoe", EXPERTS),
    "glm": Family("glm", {"partial_rotary_factor": 0.5}),
    "glm4": Family("glm4", {"partial_rotary_factor": 0.5}),
    "exaone4": Family("exaone4", {**WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "smollm3": Family("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "falcon-mqa": Family("falcon", {"multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "falcon-groups": Family("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}),
    "gpt-oss": Family("gpt_oss", {**EXPERTS, **WINDOW, "num_hidden_layers": 2}),
    "nemotron": Family("nemotron"),
    "seed-oss": Family("seed_oss"),
    "ernie4.5": Family("ernie4_5"),
    "arcee": Family("arcee"),
    "apertus": Family("apertus"),
    "hunyuan": Family("hunyuan_v1_dense"),
    "dbrx": Family("dbrx"),
    "persimmon": Family("persimmon"),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **WINDOW,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": 2 * ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "activation_sparsity_pattern": None,
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **WINDOW,
            "num_hidden_layers": 4,
            "layer_types": 2 * ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 32,
            "global_head_dim": 64,
        },
    ),
    "llama4": Family(
        "llama4_text",
        {
            **EXPERTS,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 32,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 192,
        },
    ),
    "minimax-m2": Family("minimax_m2", EXPERTS),
    # heads
    "heads-4-2-64": heads(4, 2, 64),
    "heads-3-1-80": heads(3, 1, 80),
    "heads-5-1-96": heads(5, 1, 96),
    "heads-6-1-112": heads(6, 1, 112),
    "heads-4-4-120": heads(4, 4, 120),
    "heads-7-1-128": heads(7, 1, 128),
    "heads-8-1-192": heads(8, 1, 192),
    "heads-12-1-64": heads(12, 1, 64),
    "heads-16-1-32": heads(16, 1, 32),
    "heads-4-2-256": heads(4, 2, 256),
    "heads-4-4-64": heads(4, 4, 64),
    "heads-14-2-64": heads(14, 2, 64),
}

LINEAR = {"num_hidden_layers": 4, "mamba_d_state": 16, "mamba_d_conv": 4}
NOT_PLAIN: dict[str, Family] = {
    # ALiBi
    "bloom": Family("bloom", {"n_head": 4}, weights=False),
    "mpt": Family("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}, weights=False),
    "falcon-alibi": Family(
        "falcon", {"multi_query": True, "new_decoder_architecture": False, "alibi": True}, weights=False
    ),
    # MLA
    "deepseek-v2": Family(
        "deepseek_v2",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
        weights=False,
    ),
    # encoders
    "bert": Family("bert", weights=False),
    "whisper": Family(
        "whisper",
        {
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": 51865,
        },
        weights=False,
    ),
    "bart": Family("bart", weights=False),
    "t5": Family("t5", weights=False),
    # beside states
    "jamba": Family(
        "jamba", {**LINEAR, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, weights=False
    ),
    "falcon-h1": Family(
        "falcon_h1", {**LINEAR, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128}, weights=False
    ),
    "bamba": Family(
        "bamba", {**LINEAR, "mamba_n_heads": 8, "mamba_d_head": 32, "attn_layer_indices": [1, 3]}, weights=False
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "shared_expert_intermediate_size": 64,
        },
        weights=False,
    ),
    "lfm2": Family(
        "lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        weights=False,
    ),
    "granite-hybrid": Family(
        "granitemoehybrid",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
        weights=False,
    ),
    # other masks
    "hrm-text": Family("hrm_text", weights=False),
    "mimo-v2": Family("mimo_v2_flash", {**EXPERTS, "v_head_dim": 16}, weights=False),
    "minicpm3": Family(
        "minicpm3",
        {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        weights=False,
    ),
}
