"""The attention layers of a model that SGLang has loaded, and the shape of each."""

from __future__ import annotations

from typing import Any

from draftmark import AttentionShape

from .facts import RunnerFacts


def attention_layers(model: Any) -> list[Any]:
    """Every `RadixAttention` of a model, in its order."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def shape_of(layer: Any, facts: RunnerFacts) -> AttentionShape:
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
    )
