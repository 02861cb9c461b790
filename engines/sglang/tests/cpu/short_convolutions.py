"""SGLang's short convolution kernels in torch, for tests on a CPU: Triton's interpreter cannot run the kernels."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def use_short_convolutions() -> None:
    """Make LFM2 use this module's convolutions in this process, and define two names that SGLang looks up on a CPU."""
    torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu = torch.ops.sgl_kernel.fused_gdn_gating_cpu = None
    from sglang.srt.models import lfm2

    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = prefill, decode


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    conv_states: torch.Tensor,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the causal convolution of ``[channels, tokens]``, and store each request's last inputs in its state."""
    assert activation is None
    kept, out, starts = weight.shape[1] - 1, torch.empty_like(x), query_start_loc.tolist()
    for request, (first, end) in enumerate(itertools.pairwise(starts)):
        state = conv_states[int(cache_indices[request])]
        past = state[:, -kept:] * bool(has_initial_state[request])
        whole = torch.cat([past, x[:, first:end]], 1)
        out[:, first:end] = torch.nn.functional.conv1d(whole[None], weight[:, None], bias, groups=len(x))[0]
        state[:, -kept:] = whole[:, -kept:].clone()
    return out


def decode(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    *,
    conv_state_indices: Any,
    activation: Any,
) -> torch.Tensor:
    """Return the causal convolution of one token per request, ``[requests, channels]``."""
    starts, kept = torch.arange(len(x) + 1), torch.ones(len(x), dtype=torch.bool)
    state = dict(
        query_start_loc=starts, cache_indices=conv_state_indices, has_initial_state=kept, conv_states=conv_state
    )
    return prefill(x.T.contiguous(), weight, bias, activation=activation, **state).T
