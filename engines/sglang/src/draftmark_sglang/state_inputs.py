"""Inputs of the recurrence, computed from a layer's convolved channels and gate projections in plain torch.

Formulas are those of SGLang's kernels (`fused_sigmoid_gating_recurrent.py`, `kda.py`, `selective_state_update`).
`state_kernels` has the same for Gated DeltaNet in one launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

EPSILON = 1e-6
"""Added to the squared norm of a query or a key before its root."""


class Inputs(NamedTuple):
    """Arguments of `StateBackend.recur`, and what the caller adds to its output.

    Attributes:
        q, k, v, log_decay, beta: see `StateBackend.recur`.
        skip: ``[rows, num_heads, value_dim]`` to add to the output; None for nothing.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None
    skip: torch.Tensor | None = None


def delta_inputs(layer: Any, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, raw_beta: bool = True) -> Inputs:
    """Return the inputs of a Gated DeltaNet or KDA layer.

    Args:
        layer: SGLang's `RadixLinearAttention`.
        mixed: ``[rows, channels]`` after the convolution: q, k, v.
        a: ``[rows, num_heads]`` or ``[rows, num_heads, key_dim]``, decays before softplus.
        b: ``[rows, num_heads]``, write strengths before the sigmoid, or after it if not `raw_beta`.
    """
    heads, keys, rows = layer.num_v_heads, layer.head_k_dim, len(mixed)
    q, k, v = torch.split(mixed, [layer.q_dim, layer.k_dim, layer.v_dim], -1)
    q = normalised(torch.unflatten(q, -1, (-1, keys)), keys**-0.5)
    k = normalised(torch.unflatten(k, -1, (-1, keys)))
    rate, bias = layer.A_log.float().view(heads), layer.dt_bias.float()
    if a.dim() > 2:
        rate, bias = rate[:, None], bias.view(heads, keys)
    decay = -rate.exp() * torch.nn.functional.softplus(a.float() + bias)
    beta = b.float().sigmoid() if raw_beta else b.float()
    return Inputs(q, k, v.view(rows, heads, -1), decay, beta.view(rows, heads))


def normalised(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return vectors ``[…, key_dim]`` of length `scale`, computed in float32."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + EPSILON).rsqrt() * scale).to(x.dtype)


def mamba2_inputs(mixer: Any, mixed: torch.Tensor, dt: torch.Tensor) -> Inputs:
    """Return the inputs of a Mamba2 layer.

    Args:
        mixer: SGLang's `MambaMixer2`.
        mixed: ``[rows, channels]`` after the convolution: x, B, C.
        dt: ``[rows, num_heads]``, time steps before softplus.
    """
    ranks = mixer.tp_size
    inner, grouped = mixer.num_heads * mixer.head_dim // ranks, mixer.groups_ssm_state_size // ranks
    x, keys, queries = torch.split(mixed, [inner, grouped, grouped], -1)
    x = torch.unflatten(x, -1, (-1, mixer.head_dim))
    keys, queries = (torch.unflatten(one, -1, (-1, mixer.ssm_state_size)) for one in (keys, queries))
    step = torch.nn.functional.softplus(dt.float() + mixer.dt_bias.float())
    v = (step[..., None] * x.float()).to(x.dtype)
    return Inputs(queries, keys, v, step * mixer.A.float(), None, mixer.D.to(x.dtype)[:, None] * x)
