"""What a decoder layer does between its products, element by element: rotary positions and SwiGLU.

On CUDA Inductor makes one kernel of each where torch's operators take four and two, which pass over the rows as often.
They are made when a model is wrapped, for one row and for any number of them, so that no forward waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

Rotation = Callable[[torch.Tensor, int, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Activation = Callable[[torch.Tensor], torch.Tensor]

REHEARSED_ROWS = (2, 3, 1)
"""The second size tells the compiler that rows vary; one row is a kernel of its own to it."""


def rotated(
    heads: torch.Tensor, num_q: int, num_k: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary positions in Llama's layout, in four launches: ``x · cos + (second half, first half) · sin``.

    Args:
        heads: ``[…, rows, at least num_q + num_k, head_dim]``: queries, then keys.
        cos, sin: ``[…, rows, 1, head_dim]``, sin negated in its first half.

    Returns:
        ``[…, rows, num_q, head_dim]`` and ``[…, rows, num_k, head_dim]``, contiguous.
    """
    turned = heads[..., : num_q + num_k, :]
    first, second = turned.chunk(2, -1)
    straight, swapped = turned * cos, torch.cat((second, first), -1)
    q = torch.addcmul(straight[..., :num_q, :], swapped[..., :num_q, :], sin)
    return q, torch.addcmul(straight[..., num_q:, :], swapped[..., num_q:, :], sin)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``[rows, 2 · n]``, gates and then what they let through → ``[rows, n]``, contiguous."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Elementwise:
    """`rotated` and `swiglu`, as one model runs them."""

    rotated: Rotation = rotated
    swiglu: Activation = swiglu


def elementwise(like: torch.Tensor, num_q: int, num_k: int, head_dim: int, intermediate: int) -> Elementwise:
    """The two for a model's shapes: compiled and run once on CUDA, torch's operators elsewhere and without a compiler.

    Args:
        like: a weight: the dtype and device of all that is computed.
        num_q, num_k: heads that turn. Values lie behind them, as many as keys.
    """
    if like.device.type != "cuda":
        return Elementwise()
    made = Elementwise(torch.compile(rotated), torch.compile(swiglu))
    try:
        with torch.inference_mode():
            for rows in REHEARSED_ROWS:
                angles = like.new_zeros(rows, 1, head_dim)
                made.rotated(like.new_zeros(rows, num_q + 2 * num_k, head_dim), num_q, num_k, angles, angles)
                made.swiglu(like.new_zeros(rows, 2 * intermediate))
    except Exception:  # no C compiler on this machine, for one; what it saves is time
        return Elementwise()
    return made
