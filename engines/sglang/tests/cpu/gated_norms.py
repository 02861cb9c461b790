"""SGLang's gated norms of recurrent layers and gates of shared experts in torch, for tests on a CPU.

Triton 3.9 has no block pointers any more, which the norms use. In Triton's interpreter the gates
take 4/5 of a test's time.
"""

from __future__ import annotations

from typing import Any

import torch


def use_torch_norms() -> None:
    """Make the recurrent layers of SGLang's models use `norm_and_gate` in this process."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    fused_norm_gate.rms_norm_gated = norm_and_gate


def use_torch_gates() -> None:
    """Make the experts of SGLang's Qwen models use `add_gated` in this process."""
    from sglang.srt.models import qwen2_moe

    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated


def add_gated(x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> None:
    """Add the shared expert's output, times the sigmoid of its gate, to the routed experts' output in place.

    x, shared and routed are ``[tokens, width]``, weight is ``[width]``.
    """
    routed += (x @ weight).sigmoid()[:, None] * shared


def norm_and_gate(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, eps: float, **named: Any
) -> torch.Tensor:
    """Return RMS norm of x times the activation of g, both ``[…, width]``."""
    assert bias is None and named.get("residual") is None and activation in ("silu", "swish", "sigmoid")
    wide = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    gate = g.float().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(g.float())
    return (wide * gate).to(x.dtype)
