"""The attention layers of a model that SGLang has loaded, and the shape of each."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import AttentionShape

from .facts import RunnerFacts


def attention_layers(model: Any) -> list[Any]:
    """Every `RadixAttention` of a model, in its order."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def sinks_of_layers(model: Any, layers: list[Any]) -> dict[int, torch.Tensor]:
    """The sinks of layers, a weight of the module around each, as float32 on their device: copies, by layer."""
    found: dict[int, torch.Tensor] = {}
    ours = {id(layer): layer.layer_id for layer in layers}
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, torch.Tensor):
            inside = [ours[id(one)] for one in module.modules() if id(one) in ours]
            found |= {layer_id: sinks.detach().to(torch.float32, copy=True) for layer_id in inside}
    return found


def shape_of(layer: Any, facts: RunnerFacts, sinks: bool = False) -> AttentionShape:
    """One layer's shape on this rank. Like `window_left`, `sliding_window_size` does not count the row itself."""
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
    )
