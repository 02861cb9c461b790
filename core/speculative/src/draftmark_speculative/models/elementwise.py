"""Element-wise parts of a decoder layer between its matrix products: rotary positions and SwiGLU.

On CUDA, Inductor compiles each into one kernel. torch's operators take four and two kernels, and each passes over all
rows. For one row, the kernels of the matrix products compute both (`row_kernels`). Every kernel is compiled when a
model is wrapped, so no forward waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

Rotation = Callable[[torch.Tensor, int, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Activation = Callable[[torch.Tensor], torch.Tensor]

REHEARSED_ROWS = (2, 3, 1)
"""Row counts of the warm-up runs. The second size makes the row count dynamic; one row gets its own kernel."""


def rotated(
    heads: torch.Tensor, num_q: int, num_k: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary positions in Llama's layout, in four launches: ``x · cos + (second half, first half) · sin``.

    Args:
        heads: ``[…, rows, at least num_q + num_k, head_dim]``: queries, then keys.
        cos, sin: ``[…, rows, 1, head_dim]``, sin negated in its first half.

    Returns:
        Queries ``[…, rows, num_q, head_dim]`` and keys ``[…, rows, num_k, head_dim]``, contiguous.
    """
    turned = heads[..., : num_q + num_k, :]
    first, second = turned.chunk(2, -1)
    straight, swapped = turned * cos, torch.cat((second, first), -1)
    q = torch.addcmul(straight[..., :num_q, :], swapped[..., :num_q, :], sin)
    return q, torch.addcmul(straight[..., num_q:, :], swapped[..., num_q:, :], sin)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up: ``[rows, 2 · n]``, gates first → ``[rows, n]``, contiguous."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Elementwise:
    """Holds the implementations that one model runs: compiled kernels or torch operators.

    Attributes:
        rotated, swiglu: functions of this module, or their compiled forms.
        row_product: `row_kernels.row_product`, for forwards with one row; None without Triton.
    """

    rotated: Rotation = rotated
    swiglu: Activation = swiglu
    row_product: Callable[..., torch.Tensor] | None = None


def elementwise(like: torch.Tensor, num_q: int, num_k: int, head_dim: int, intermediate: int) -> Elementwise:
    """Return the functions for a model's shapes.

    On CUDA `rotated` and `swiglu` are compiled and run once; `FusedDecoder` runs `row_product` once. Without CUDA or a
    compiler they are torch's operators, and there is no `row_product`.

    Args:
        like: a weight with the dtype and device of the computation.
        num_q, num_k: number of query and key heads, which are rotated. num_k value heads follow the keys.
    """
    if like.device.type != "cuda":
        return Elementwise()
    try:
        from .row_kernels import row_product

        made = Elementwise(torch.compile(rotated), torch.compile(swiglu), row_product)
        with torch.inference_mode():
            for rows in REHEARSED_ROWS:
                angles = like.new_zeros(rows, 1, head_dim)
                made.rotated(like.new_zeros(rows, num_q + 2 * num_k, head_dim), num_q, num_k, angles, angles)
                made.swiglu(like.new_zeros(rows, 2 * intermediate))
    except Exception:  # for example no C compiler; torch's operators compute the same, only slower
        return Elementwise()
    return made
