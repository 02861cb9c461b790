"""What the configuration says of each layer's attention, to be held against what the layer really asks for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from draftmark.errors import ModelError

from .attention import LayerAttention


def verify(config: Any, called: tuple[LayerAttention, ...], name: str) -> tuple[LayerAttention, ...]:
    """`called`, when the text `config` says the same of every layer.

    A window or a cap that is configured but never reaches the attention function lives in a mask or nowhere, and
    would be dropped.

    Raises:
        ModelError: the first layer and field that differ.
    """
    for index, layer in enumerate(called):
        configured = _configured(config, index, layer)
        for field in (field.name for field in fields(LayerAttention)):
            says, got = getattr(configured, field), getattr(layer, field)
            if says != got:
                raise ModelError(
                    f"model {name!r} (family {config.model_type}) cannot be decoded: its configuration says {field} "
                    f"{says} for layer {index}, but the layer calls attention with {got}; use a transformers release "
                    "or a model in which both agree"
                )
    return called


def _configured(config: Any, index: int, called: LayerAttention) -> LayerAttention:
    """The configuration's view. The scale is taken from the call where no field declares it."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    scale = called.softmax_scale
    if getattr(config, "query_pre_attn_scalar", None):
        scale = float(config.query_pre_attn_scalar) ** -0.5
    elif getattr(config, "attention_multiplier", None):
        scale = float(config.attention_multiplier)
    return replace(
        called,
        num_qo_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        softmax_scale=scale,
        window_left=_window_left(config, index),
        logits_soft_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
    )


def _window_left(config: Any, index: int) -> int:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    off = window == 0 or getattr(config, "use_sliding_window", True) is False
    if off or (types and types[index] != "sliding_attention"):
        return -1
    return int(window) - 1
