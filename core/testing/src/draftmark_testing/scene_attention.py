"""Attention of a scene in float64, one dot product at a time.

It shares no code with the core and none with the contract's oracle, so the tests of the core have a second opinion.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .scenes import Scene


def expected_attention(scene: Scene, q: torch.Tensor, k: list[torch.Tensor], v: list[torch.Tensor]) -> np.ndarray:
    """Return the output of every live row, float64 ``[rows, num_qo_heads, value_width]``."""
    a = scene.geometry.attention
    assert a.softmax_scale is not None
    out = np.zeros((len(scene.rows()), a.num_qo_heads, a.value_width))
    queries, keys, values = q.double().numpy(), [t.double().numpy() for t in k], [t.double().numpy() for t in v]
    for row, (request, own) in enumerate(scene.rows()):
        visible = scene.visible(request, own)
        for head in range(a.num_qo_heads if visible else 0):
            shared = head * a.num_kv_heads // a.num_qo_heads
            logits = [a.softmax_scale * float(queries[row, head] @ keys[request][key, shared]) for key in visible]
            if a.logits_soft_cap:
                logits = [a.logits_soft_cap * math.tanh(x / a.logits_soft_cap) for x in logits]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            total = sum(weights)
            for key, weight in zip(visible, weights, strict=True):
                out[row, head] += weight / total * values[request][key, shared]
    return out
