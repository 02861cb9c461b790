"""The attention layers of a model that SGLang has loaded, and the shape of each."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import AttentionShape
from draftmark_engines import EngineError

from .facts import RunnerFacts

SINKS = ("sinks", "attention_sink_bias")
"""What models call the weight of their attention sinks: gpt-oss, MiMo-V2."""


def attention_layers(model: Any) -> list[Any]:
    """Every `RadixAttention` of a model, in its order."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return found or _wrapped_layers(model)


def _wrapped_layers(model: Any) -> list[Any]:
    """Those of a model of the transformers package, which SGLang keeps in a mapping beside it.

    SGLang gives such a layer its scale when it is first run, so it is given here.

    Raises:
        EngineError: a layer's module does not say its scale.
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
                f"layer {number} of a model of the transformers package does not say its scale before it runs; use one "
                "that SGLang has itself, or one of SGLang's own backends"
            )
        layer.scaling = scales[number]
    return list(layers.values())


def sinks_of_layers(model: Any, layers: list[Any]) -> dict[int, torch.Tensor]:
    """The sinks of layers, a weight of the module around each, as float32 on their device: copies, by layer."""
    found: dict[int, torch.Tensor] = {}
    ours = {id(layer): layer.layer_id for layer in layers}
    for module in model.modules():
        sinks = next((one for name in SINKS if isinstance(one := getattr(module, name, None), torch.Tensor)), None)
        if sinks is not None:
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
