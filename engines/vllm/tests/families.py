"""Table of model families: a tiny random decoder of each, and the vLLM arguments that it needs on a CPU."""

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
    "initializer_range": 0.1,  # large random weights make attention uneven, so a wrong key changes the result
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """Describes one family of decoder models, and writes a tiny model of it.

    Attributes:
        kind: transformers' `model_type`.
        config: differences from the configuration `USUAL`. A value of None removes the name.
        architecture: vLLM's name, for families that vLLM refuses. Only their configuration is written, no weights.
        arguments: vLLM arguments that the family needs on a CPU.
        since: first release in which vLLM's own CPU attention runs this family.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    architecture: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    since: str = ""

    def write(self, folder: Path, name: str) -> str:
        """Write the model to a folder of its own, once, and return the folder."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path = folder / f"family-{name}"
        if not (path / "config.json").exists():
            values = {name: value for name, value in {**USUAL, **self.config}.items() if value is not None}
            config = AutoConfig.for_model(self.kind, **values)
            torch.manual_seed(0)
            if self.architecture is None:
                AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(path)
            else:
                config.architectures = [self.architecture]
                config.save_pretrained(path)
        return str(path)


def heads(queries: int, keys: int, head_dim: int) -> Family:
    """Return a Qwen 3 with these numbers of query heads and KV heads and this head size."""
    return Family("qwen3", {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": head_dim})


def by_turns(*kinds: str) -> dict[str, Any]:
    """Return a configuration of four layers that alternate between two layer types."""
    return {"num_hidden_layers": 4, "layer_types": 2 * list(kinds)}


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOW = {"sliding_window": 32}
WINDOWS = {**WINDOW, **by_turns("sliding_attention", "full_attention")}
PARTIAL = {"partial_rotary_factor": 0.5}
PER_LAYER = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32}
FALCON = {"head_dim": None, "alibi": False}
# A Mamba state that is larger than the KV of 16 tokens, so that vLLM uses larger pages, with gaps. With these pages
# vLLM's CPU attention serves only prompts that are not chunked.
STATES = {"mamba_d_state": 128, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1}
WHOLE = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "enable_prefix_caching": False, "speculative_config": None}

SERVED: dict[str, Family] = {
    "llama": Family("llama"),
    "llama-4": Family(
        "llama4_text",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 192,
        },
    ),
    "qwen-2": Family("qwen2", {"use_sliding_window": False}),
    "qwen-2-moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen-3": Family("qwen3"),
    "qwen-3-moe": Family("qwen3_moe", EXPERTS),
    "mistral": Family("mistral", WINDOW),
    "ministral": Family("ministral", WINDOW),
    "mixtral": Family("mixtral", EXPERTS),
    "gemma": Family("gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma-2": Family("gemma2", {**WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}),
    "gemma-3": Family("gemma3_text", {**WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
    "gemma-3n": Family(
        "gemma3n_text", {**WINDOWS, **PER_LAYER, "num_kv_shared_layers": 2, "laurel_rank": 16}, since="0.30"
    ),
    "gemma-4": Family("gemma4_text", {**WINDOWS, **PER_LAYER, "num_kv_shared_layers": 0, "global_head_dim": 64}),
    "gpt-oss": Family("gpt_oss", {**EXPERTS, **WINDOW}, since="0.31"),
    "phi": Family("phi", PARTIAL),
    "phi-3": Family("phi3", PARTIAL),
    "phi-3-window": Family("phi3", WINDOW),
    "gpt-2": Family("gpt2"),
    "gpt-j": Family("gptj", {"rotary_dim": 16}),
    "gpt-bigcode": Family("gpt_bigcode", {"multi_query": True, "num_key_value_heads": 1}),
    "starcoder-2": Family("starcoder2", WINDOW),
    "opt": Family("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "falcon": Family("falcon", {**FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-groups": Family("falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "stablelm": Family("stablelm"),
    "olmo": Family("olmo"),
    "olmo-2": Family("olmo2"),
    "olmo-3": Family("olmo3", {**WINDOW, "num_hidden_layers": 4}),
    "olmoe": Family("olmoe", EXPERTS),
    "cohere": Family("cohere"),
    "cohere-2": Family("cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "granite": Family("granite", {"attention_multiplier": 0.2}),
    "granite-of-transformers": Family(
        "granite", {"attention_multiplier": 0.2}, arguments={"model_impl": "transformers"}
    ),
    "granite-moe": Family("granitemoe", EXPERTS),
    "granite-hybrid": Family(
        "granitemoehybrid", {**EXPERTS, **STATES, **by_turns("mamba", "attention")}, arguments=WHOLE
    ),
    "falcon-h1": Family("falcon_h1", {**STATES, "mamba_d_ssm": 256}, arguments=WHOLE),
    "glm": Family("glm", PARTIAL),
    "glm-4": Family("glm4", PARTIAL),
    "exaone-4": Family("exaone4", {**WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "smollm-3": Family("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "nemotron": Family("nemotron"),
    "seed-oss": Family("seed_oss"),
    "ernie-4.5": Family("ernie4_5"),
    "arcee": Family("arcee"),
    "apertus": Family("apertus"),
    "hunyuan": Family("hunyuan_v1_dense"),
    # These shapes cover groups of 1 to 16 query heads, one or more KV heads, and each head size of vLLM's CPU kernel.
    "heads-4-4-64": heads(4, 4, 64),
    "heads-4-2-64": heads(4, 2, 64),
    "heads-3-1-80": heads(3, 1, 80),
    "heads-5-1-96": heads(5, 1, 96),
    "heads-6-1-112": heads(6, 1, 112),
    "heads-7-1-128": heads(7, 1, 128),
    "heads-14-2-64": heads(14, 2, 64),
    "heads-8-1-192": heads(8, 1, 192),
    "heads-12-1-64": heads(12, 1, 64),
    "heads-16-1-32": heads(16, 1, 32),
    "heads-4-2-256": heads(4, 2, 256),
}

REFUSED: dict[str, tuple[Family, str]] = {
    "bloom": (Family("bloom", {"n_head": 4}, "BloomForCausalLM"), "the model has ALiBi slopes, which are not served"),
    "falcon-alibi": (
        Family("falcon", {**FALCON, "alibi": True, "new_decoder_architecture": False}, "FalconForCausalLM"),
        "the model has ALiBi slopes, which are not served",
    ),
    "bert": (Family("bert", {}, "BertModel"), "ENCODER_ONLY not supported"),
    "gemma-3-encoder": (
        Family("gemma3_text", {**WINDOW, "use_bidirectional_attention": True}, "Gemma3TextModel"),
        "ENCODER_ONLY not supported",
    ),
    "qwen-2-encoder": (Family("qwen2", {"is_causal": False}, "Qwen2ForCausalLM"), "ENCODER_ONLY not supported"),
    "hrm-text": (
        Family("hrm_text", {}, "HrmTextForCausalLM"),
        "layers of vLLM's kind EncoderOnlyAttention, which is not served",
    ),
}
