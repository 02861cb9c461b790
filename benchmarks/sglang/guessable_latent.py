"""A small random DeepSeek V3 with predictable next tokens, and its MTP layer, which often predicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftmark_sglang_judge.small_models import write_config

from .guessable import VOCABULARY

HIDDEN, INNER, LAYERS, EXPERTS = 1024, 1024, 4, 8
HEADS, LATENT, ROTATED, PLAIN, VALUE, QUERY_RANK = 16, 512, 64, 64, 64, 256
"""Heads; elements of a stored row's two parts; of a head's key without rotation, and value; of the queries' latent."""
YARN = dict(
    type="yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=1.0,
    beta_fast=32, beta_slow=1, rope_theta=10000.0,
)  # fmt: skip
"""SGLang has no other rotary embedding for MLA on a CPU."""
SMALL: dict[str, Any] = dict(
    model_type="deepseek_v3",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    intermediate_size=INNER,
    max_position_embeddings=2048,
    kv_lora_rank=LATENT,
    q_lora_rank=QUERY_RANK,
    qk_rope_head_dim=ROTATED,
    qk_nope_head_dim=PLAIN,
    v_head_dim=VALUE,
    head_dim=ROTATED,
    rope_scaling=YARN,
    num_nextn_predict_layers=1,
    first_k_dense_replace=99,
    moe_layer_freq=1,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    moe_intermediate_size=INNER,
    routed_scaling_factor=1.0,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
)
"""Configuration. Only the MTP layer has experts: SGLang's always has."""
MLP = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
NORMS = {
    "self_attn.q_a_layernorm": QUERY_RANK,
    "self_attn.kv_a_layernorm": LATENT,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}
OUTPUTS = ("o_proj", "down_proj")

Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, int]]


def write_latent(folder: Path, dtype: str, plain: int = PLAIN, value: int = VALUE) -> Path:
    """Write the model's folder and return it.

    Args:
        plain, value: elements of a head's key without rotation, and of its value.

    Most of a hidden state is the last token's embedding, so the MTP layer predicts from it. The other layers still
    change most texts.
    """
    make = torch.Generator().manual_seed(5)
    sizes = {"qk_nope_head_dim": plain, "v_head_dim": value}
    write_config(folder, "DeepseekV3ForCausalLM", **SMALL | sizes, torch_dtype=dtype)
    attention = _attention_shapes(plain, value)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=make),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _drawn("lm_head", (VOCABULARY, HIDDEN), 1.2, make),
    }
    for layer in range(LAYERS):
        weights |= _attention(f"model.layers.{layer}", attention, 1.2, make)
        weights |= _mlp(f"model.layers.{layer}.mlp", 1.2, make)
    weights |= _mtp_layer(f"model.layers.{LAYERS}", attention, make)
    kind = getattr(torch, dtype)
    save_file({name: one.to(kind) for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _drawn(name: str, shape: tuple[int, int], scale: float, make: torch.Generator) -> torch.Tensor:
    """Return a random matrix; the outputs of layers are smaller."""
    small = 0.25 if name in OUTPUTS else 1.0
    return scale * small / shape[1] ** 0.5 * torch.randn(shape, generator=make)


def _attention_shapes(plain: int, value: int) -> Shapes:
    """Return the shape of each matrix of an attention layer."""
    return {
        "q_a_proj": (QUERY_RANK, HIDDEN),
        "q_b_proj": (HEADS * (plain + ROTATED), QUERY_RANK),
        "kv_a_proj_with_mqa": (LATENT + ROTATED, HIDDEN),
        "kv_b_proj": (HEADS * (plain + value), LATENT),
        "o_proj": (HIDDEN, HEADS * value),
    }


def _attention(layer: str, shapes: Shapes, scale: float, make: torch.Generator) -> Weights:
    found = {f"{layer}.self_attn.{name}.weight": _drawn(name, shape, scale, make) for name, shape in shapes.items()}
    return found | {f"{layer}.{name}.weight": torch.ones(width) for name, width in NORMS.items()}


def _mlp(name: str, scale: float, make: torch.Generator) -> Weights:
    return {f"{name}.{part}.weight": _drawn(part, shape, scale, make) for part, shape in MLP.items()}


def _mtp_layer(layer: str, attention: Shapes, make: torch.Generator) -> Weights:
    """Return the weights of the MTP layer. It keeps the embedding of the last token, and adds little to it."""
    through = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    weights = _attention(layer, attention, 0.16, make)
    weights |= {f"{layer}.{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{layer}.eh_proj.weight"] = through + 0.16 / HIDDEN**0.5 * torch.randn(through.shape, generator=make)
    weights[f"{layer}.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN, generator=make)
    weights[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    for part in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
        weights |= _mlp(f"{layer}.mlp.{part}", 0.16, make)
    return weights
