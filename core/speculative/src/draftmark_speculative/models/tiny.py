"""Tiny random-weight models for tests and examples, made offline in milliseconds.

Their text is meaningless, but the models run the real code of their families. Embeddings are not tied and weights
are wide, so that greedy text does not fall into a loop at once. Tied random embeddings repeat one token, and a
comparison of such texts shows nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftmark import ModelError

from .causal_lm import CausalLM
from .loading import wrap_model
from .tiny_hybrids import HYBRIDS, slow_decays

WINDOW = 9
"""Sliding window of the windowed families in Hugging Face's count: a query sees itself and 8 positions to its left."""

_SHARED: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, **_MIXED},
    "gemma3_text": {"head_dim": 24, "query_pre_attn_scalar": 20, "num_key_value_heads": 1, **_MIXED},
    "phi3": {},
    "gpt_oss": {
        **{"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
        **{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 20, "qk_nope_head_dim": 12, "v_head_dim": 16, **_LATENT},
        **{"num_hidden_layers": 3, **_EXPERTS},
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            **{"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "glm4_moe_lite": {
        **{"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12},
        **{"v_head_dim": 20, **_LATENT, **_EXPERTS, "n_group": 1, "rope_interleave": False},
    },
    "minicpm3": {
        **{"num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": None, "qk_nope_head_dim": 8},
        **{"v_head_dim": 8, "kv_lora_rank": 24, "qk_rope_head_dim": 4, "scale_emb": 1.0},
    },
}
"""Model types of transformers with attention only, and the fields in which each differs from the shared shape.

`tiny_hybrids.HYBRIDS` has those with recurrent state."""


def tiny_model(
    family: str, seed: int = 0, *, vocab_size: int = 256, dtype: str = "float32", **overrides: Any
) -> CausalLM:
    """Make a tiny model of `family` with weights drawn from `seed`; the global random state does not change.

    Args:
        family: a key of `FAMILIES` or `tiny_hybrids.HYBRIDS`; ``"gemma3"`` means its text model.
        overrides: configuration fields.

    Raises:
        ModelError: the family is unknown, or the overrides make a model that is rejected.
    """
    hf = tiny_hf_model(family, seed, vocab_size=vocab_size, dtype=dtype, **overrides)
    return wrap_model(hf, name=f"tiny-{family}")


def tiny_hf_model(
    family: str, seed: int = 0, *, vocab_size: int = 256, dtype: str = "float32", **overrides: Any
) -> Any:
    """Make the transformers model of `tiny_model` without wrapping or checking it."""
    family = "gemma3_text" if family == "gemma3" else family
    shapes = {**FAMILIES, **HYBRIDS}
    if family not in shapes:
        raise ModelError(f"family is {family!r}, but tiny models exist for {', '.join(shapes)}; choose one of them")
    fields = {**_SHARED, **shapes[family], "vocab_size": vocab_size, **overrides}
    config = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        slow_decays(model)
    return model.to(getattr(torch, dtype)).eval()
