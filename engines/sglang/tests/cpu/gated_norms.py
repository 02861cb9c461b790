"""SGLang's gated norms of recurrent layers in torch, for tests on a CPU: Triton 3.9 has no block pointers any more."""

from __future__ import annotations

from typing import Any

import torch


def use_torch_norms() -> None:
    """Make the recurrent layers of SGLang's models use `norm_and_gate` in this process."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    fused_norm_gate.rms_norm_gated = norm_and_gate


def norm_and_gate(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, eps: float, **named: Any
) -> torch.Tensor:
    """Return RMS norm of x times the activation of g, both ``[…, width]``."""
    assert bias is None and named.get("residual") is None and activation in ("silu", "swish", "sigmoid")
    wide = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    gate = g.float().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(g.float())
    return (wide * gate).to(x.dtype)
