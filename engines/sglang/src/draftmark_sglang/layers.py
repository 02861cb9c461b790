"""Attention layers of a model that SGLang has loaded, and the attention shape of each layer."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import AttentionShape
from draftmark_engines import EngineError

from .facts import RunnerFacts

SINKS = ("sinks", "attention_sink_bias")
"""Attribute names of the attention sinks' weight in SGLang's models (gpt-oss, MiMo-V2)."""


def attention_layers(model: Any) -> list[Any]:
    """Return every `RadixAttention` layer of a model that runs, in the model's order.

    An MLA module has two: `attn_mqa` runs after absorption, and `attn_mha`, which `latent` turns off, before it.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    off = {id(one.attn_mha) for one in model.modules() if hasattr(one, "attn_mqa") and hasattr(one, "attn_mha")}
    found = [module for module in model.modules() if isinstance(module, RadixAttention) and id(module) not in off]
    return found or _wrapped_layers(model)


def _wrapped_layers(model: Any) -> list[Any]:
    """Return the attention layers of a transformers model, which SGLang keeps in a mapping outside the module tree.

    SGLang sets such a layer's scale only when the layer first runs, so this function sets it.

    Raises:
        EngineError: the module of a layer has no scale.
    """
    layers = dict(getattr(model, "attention_instances", None) or {})
    scales = {
        module.layer_idx: module.scaling
        for module in model.modules()
        if hasattr(module, "layer_idx") and isinstance(getattr(module, "scaling", None), float)
    }
    for number, layer in layers.items():
        if number not in scales:
            raise EngineError(
                f"layer {number} of a model of the transformers package has no scale before it first runs; use a model "
                "that SGLang implements itself, or one of SGLang's own backends"
            )
        layer.scaling = scales[number]
    return list(layers.values())


def sinks_of_layers(model: Any, layers: list[Any]) -> dict[int, torch.Tensor]:
    """Return the attention sinks by layer id, copied to float32 on their device.

    The module that contains the layer holds the sinks as a weight.
    """
    found: dict[int, torch.Tensor] = {}
    ours = {id(layer): layer.layer_id for layer in layers}
    for module in model.modules():
        sinks = next((one for name in SINKS if isinstance(one := getattr(module, name, None), torch.Tensor)), None)
        if sinks is not None:
            inside = [ours[id(one)] for one in module.modules() if id(one) in ours]
            found |= {layer_id: sinks.detach().to(torch.float32, copy=True) for layer_id in inside}
    return found


def shape_of(layer: Any, facts: RunnerFacts, sinks: bool = False) -> AttentionShape:
    """Return a layer's attention shape on this rank.

    SGLang's `sliding_window_size` excludes the row itself, as `window_left` does.
    """
    return AttentionShape(
        num_qo_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim,
        page_size=facts.page_size,
        q_dtype=facts.q_dtype,
        kv_dtype=facts.kv_dtype,
        softmax_scale=float(layer.scaling),
        window_left=-1 if layer.sliding_window_size is None else int(layer.sliding_window_size),
        logits_soft_cap=float(layer.logit_cap or 0.0),
        sinks=sinks,
        value_dim=layer.v_head_dim if facts.latent else None,
        latent=facts.latent,
    )
