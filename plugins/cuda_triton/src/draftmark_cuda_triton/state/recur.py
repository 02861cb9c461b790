"""Launches of the recurrence of a layer: rows in place, and the verify of chains and trees."""

from __future__ import annotations

import torch
import triton

from draftmark import Gate, Recurrence, StateShape
from draftmark.runtime import ForwardBatch

from ..launch.launcher import launch_kernel
from .launching import kernel_for, kernels
from .sizing import StateBlocks

ROW_TENSORS = ("q", "k", "v", "log_decay", "beta", "state", "slots", "prefix_lens", "q_indptr", "out")
"""Kernel parameters of the tensors of `row_tensors`, in order."""


def row_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    batch: ForwardBatch,
    out: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a recurrence in the order of ROW_TENSORS."""
    return q, k, v, log_decay, beta, state, batch.state_slots, batch.prefix_lens, batch.q_indptr, out


def launch_rows(
    shape: StateShape,
    blocks: StateBlocks,
    one_row: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch `kernels.rows.recur_rows`; the tensors are those of `row_tensors`.

    Args:
        one_row: each request has one row, as in DECODE.
    """
    grid = triton.cdiv(shape.value_dim, blocks.block_v), shape.num_heads, len(slots)
    decay = q if log_decay is None else log_decay
    launch_kernel(
        kernel_for(kernels.rows.recur_rows, q), grid,
        q, k, v, decay, v if beta is None else beta, state, slots, prefix_lens, q_indptr, out,
        *head_strides(q, k, v), *decay_strides(shape, log_decay), 0 if beta is None else beta.stride(0),
        HEADS_PER_KEY=shape.heads_per_key, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, **kinds(shape),
        ONE_ROW=one_row, BLOCK_V=blocks.block_v, CHUNK=blocks.chunk, CHUNKS=blocks.chunks, num_warps=blocks.num_warps,
    )  # fmt: skip


def head_strides(*tensors: torch.Tensor) -> list[int]:
    """Return the strides of rows and heads of tensors ``[rows, heads, elements]``."""
    return [stride for one in tensors for stride in one.stride()[:2]]


def decay_strides(shape: StateShape, log_decay: torch.Tensor) -> tuple[int, int]:
    """Return the strides of rows and heads of the decays; a constant decay has row stride 0."""
    if shape.gate is Gate.CONSTANT:
        return 0, log_decay.stride(0)
    return log_decay.stride(0), log_decay.stride(1)


def kinds(shape: StateShape) -> dict[str, bool]:
    """Return the constants that tell a layer's recurrence and gate to a kernel."""
    return {"DELTA": shape.recurrence is Recurrence.DELTA, "KEY_GATE": shape.gate is Gate.KEY}
