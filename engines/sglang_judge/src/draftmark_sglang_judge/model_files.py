"""Configurations of tiny models. SGLang creates random weights for them (`load_format="dummy"`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .setups import CONTEXT, Heads
from .small_models import write_config

NOPE, VALUE, LOW = 16, 16, 24
"""Elements of a head's part without rotation and of its value, before absorption; rank of the queries."""


def write_mla_models(folder: Path, heads: Heads) -> tuple[Path, Path]:
    """Write the folder of a DeepSeek V3 of one layer without experts, and return it twice: its MTP layer drafts.

    The model has yarn, because SGLang has no other rotary embedding for MLA on a CPU.
    """
    rope, hidden = heads.head_dim - heads.value_dim, 64
    yarn = dict(type="yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0)
    yarn |= dict(mscale_all_dim=1.0, beta_fast=32, beta_slow=1, rope_theta=10000.0)
    shape: dict[str, Any] = dict(
        model_type="deepseek_v3",
        vocab_size=32,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=heads.num_qo_heads,
        num_key_value_heads=heads.num_qo_heads,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        torch_dtype=heads.dtype,
        kv_lora_rank=heads.value_dim,
        q_lora_rank=LOW,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        head_dim=rope,
        rope_scaling=yarn,
        num_nextn_predict_layers=1,
    )
    shape |= dict(first_k_dense_replace=9, moe_layer_freq=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1)
    shape |= dict(topk_group=1, n_shared_experts=1, moe_intermediate_size=64, routed_scaling_factor=1.0)
    shape |= dict(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    model = write_config(folder / "target", "DeepseekV3ForCausalLM", **shape)
    return model, model


def write_models(folder: Path, heads: Heads) -> tuple[Path, Path]:
    """Write the folders of a Llama of one layer and of an EAGLE head for it, and return both paths."""
    shape = dict(
        vocab_size=32,
        hidden_size=heads.num_qo_heads * heads.head_dim,
        num_hidden_layers=1,
        num_attention_heads=heads.num_qo_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        torch_dtype=heads.dtype,
    )
    target = write_config(folder / "target", "LlamaForCausalLM", **shape)
    return target, write_config(folder / "head", "LlamaForCausalLMEagle", **shape)
