"""Inputs of Gated DeltaNet layers in one launch: a decode step has little work, so each launch counts.

Worked size: 64 requests of 8 rows, 16 key heads of 128, 32 heads, bfloat16. Queries and keys are read and written once
(8 MiB), which takes 2 µs at 4 TB/s.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from .kernels import gated_delta_kernel
from .state_inputs import EPSILON, Inputs, delta_inputs

VECTORS = 8
"""Queries or keys of one row that a program normalises."""


def gated_delta_inputs(
    layer: Any, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, raw_beta: bool = True
) -> Inputs:
    """Return the inputs of a Gated DeltaNet or KDA layer; arguments as in `delta_inputs`.

    On a GPU one kernel computes those of Gated DeltaNet. It normalises queries and keys inside `mixed`.
    """
    if not mixed.is_cuda or a.dim() > 2:
        return delta_inputs(layer, mixed, a, b, raw_beta)
    return fused_inputs(layer, mixed, a, b)


def fused_inputs(layer: Any, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Inputs:
    """Return the inputs of a Gated DeltaNet layer from one launch; `mixed` is overwritten."""
    rows, heads, keys, key_heads = len(mixed), layer.num_v_heads, layer.head_k_dim, layer.num_k_heads
    decay = torch.empty(rows, heads, dtype=torch.float32, device=mixed.device)
    beta = torch.empty_like(decay)
    gated_delta_kernel[(rows, triton.cdiv(2 * key_heads, VECTORS))](
        mixed,
        a,
        b,
        layer.A_log,
        layer.dt_bias,
        decay,
        beta,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        heads,
        key_heads,
        keys,
        keys**-0.5,
        EPSILON,
        VECTORS,
        triton.next_power_of_2(keys),
        triton.next_power_of_2(heads),
    )
    q, k, v = torch.split(mixed, [layer.q_dim, layer.k_dim, layer.v_dim], -1)
    q, k = (torch.unflatten(one, -1, (-1, keys)) for one in (q, k))
    return Inputs(q, k, torch.unflatten(v, -1, (heads, -1)), decay, beta)
