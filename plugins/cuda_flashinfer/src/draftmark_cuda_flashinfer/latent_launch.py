"""Launches of `latent_kernels`: compiled on a GPU, in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from draftmark import AttentionShape

from . import latent_kernels
from .launch import kernel

BLOCK = 128
BLOCK_M = BLOCK_N = 32
INTERPRETED_M = 256
"""Packed rows of one program in Triton's interpreter, where time grows with the number of operations."""


@dataclass(frozen=True)
class Forward:
    """Holds the integers of one forward. They are launch arguments, so a captured graph keeps their values.

    Attributes:
        longest: rows of the request with the most rows.
        tail_len: tail slots of each request; 0 in a ragged batch, in which a request's tail is its rows.
        ragged: true for EXTEND.
    """

    longest: int
    tail_len: int
    ragged: bool


def write_slots(
    forward: Forward,
    page_size: int,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the KV slot of each row. See `latent_kernels.write_slots`."""
    kernel(latent_kernels, "write_slots", prefix_lens.is_cuda)[
        (prefix_lens.shape[0], max(1, triton.cdiv(forward.longest, BLOCK)))
    ](
        prefix_lens, q_indptr, page_table, slots, forward.tail_len, page_table.stride(0),
        PAGE=page_size, RAGGED=forward.ragged, BLOCK=BLOCK,
    )  # fmt: skip


def write_latent_rows(k: torch.Tensor, values: torch.Tensor, rest: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latent rows k ``[rows, 1, head_dim]`` at their slots. See `latent_kernels.write_latent_rows`."""
    rows, _, head_dim = k.shape
    if not rows:
        return
    kernel(latent_kernels, "write_latent_rows", k.is_cuda)[(rows,)](
        k, values, rest, slots, k.stride(0), *values.stride()[:2], *rest.stride()[:2],
        PAGE=values.shape[1], VALUE=values.shape[2], HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def attend_tail(
    forward: Forward,
    shape: AttentionShape,
    q: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Add the tail slots to attention over the prefix. See `latent_kernels.attend_tail`.

    Args:
        mask: int32 ``[rows, words]``, masks of the draft trees.
    """
    (values, rest), compiled = parts, q.is_cuda
    assert shape.softmax_scale is not None, "a latent geometry has a scale"
    block = BLOCK_M if compiled else INTERPRETED_M
    options = {"num_warps": 8, "num_stages": 1} if compiled else {}
    heads = shape.num_qo_heads
    grid = (prefix_lens.shape[0], triton.cdiv(forward.longest * heads, block))
    kernel(latent_kernels, "attend_tail", compiled)[grid](
        q, parts, (out, lse), mask, (prefix_lens, q_indptr, page_table),
        shape.softmax_scale * math.log2(math.e), forward.tail_len, heads, q.stride()[:2], values.stride()[:2],
        rest.stride()[:2], page_table.stride(0), mask.stride(0),
        PAGE=shape.page_size, VALUE=values.shape[2], REST=rest.shape[2],
        BLOCK_M=block, BLOCK_N=BLOCK_N, UPCAST=not compiled, **options,
    )  # fmt: skip
