"""Launches of the recurrence of a layer: rows in place, and the verify of chains and trees."""

from __future__ import annotations

import torch
import triton

from draftmark import Gate, Recurrence, StateShape
from draftmark.runtime import ForwardBatch

from ..kernel_variants import kernels, select_variant
from ..launch.launcher import launch_kernel
from .sizing import ROWS_PER_BLOCK, StateBlocks, state_parts, verify_blocks

VERIFY_TENSORS = (
    *("q", "k", "v", "log_decay", "beta", "state", "slots", "prefix_lens", "q_indptr", "out", "mask"),
    *("keys", "updates", "decays", "totals", "matrices"),
)
"""Kernel parameters of the tensors of `launch_verify`, in order."""
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
    """Launch `kernels.state_rows.recur_rows`; the tensors are those of `row_tensors`.

    Args:
        one_row: each request has one row, as in DECODE.
    """
    grid = triton.cdiv(shape.value_dim, blocks.block_v), shape.num_heads, len(slots)
    launch_kernel(
        select_variant(kernels.state_rows.recur_rows, q), grid,
        q, k, v, log_decay, v if beta is None else beta, state, slots, prefix_lens, q_indptr, out,
        *head_strides(q, k, v), *decay_strides(shape, log_decay), 0 if beta is None else beta.stride(0),
        state.stride(0), HEADS_PER_KEY=shape.heads_per_key, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        **kinds(shape), ONE_ROW=one_row, BLOCK_V=blocks.block_v, CHUNK=blocks.chunk, CHUNKS=blocks.chunks,
        num_warps=blocks.num_warps, maxnreg=blocks.max_registers,
    )  # fmt: skip


def launch_verify(
    shape: StateShape,
    layer: int,
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
    mask: torch.Tensor | None,
    keys: torch.Tensor,
    updates: torch.Tensor,
    decays: torch.Tensor,
    totals: torch.Tensor,
    matrices: torch.Tensor,
) -> None:
    """Launch `kernels.state_pairs.verify_pairs`, then `kernels.state_verify.recur_verify`, over `row_tensors` first.

    Args:
        layer: index of the layer in its pool.
        mask: `Tree.mask`, or None for chains.
        keys, updates, decays, totals, matrices: buffers of `sizing.state_buffers`.
    """
    _, max_reqs, nodes = keys.shape[:3]
    blocks, pairs, width = verify_blocks(shape), matrices.shape[2], matrices.shape[4]
    first_entry, precise = layer * max_reqs, shape.dtype == "float32"
    key_constants = {"HEADS_PER_KEY": shape.heads_per_key, "KEY_DIM": shape.key_dim, "BLOCK_K": blocks.block_k}
    launch_kernel(
        select_variant(kernels.state_pairs.verify_pairs, q), (pairs, shape.num_heads, len(slots)),
        q, k, log_decay, q if beta is None else beta, q_indptr, slots if mask is None else mask, keys, decays, totals,
        matrices, *head_strides(q, k), *decay_strides(shape, log_decay), 0 if beta is None else beta.stride(0),
        first_entry, nodes, width, 0 if mask is None else mask.stride(0), int(mask is not None), layer,
        **key_constants, **kinds(shape), CONSTANT=shape.gate is Gate.CONSTANT, PRECISE=precise, num_warps=1,
    )  # fmt: skip
    launch_kernel(
        select_variant(kernels.state_verify.recur_verify, q),
        (triton.cdiv(shape.value_dim, blocks.block_v), shape.num_heads, len(slots)),
        q, k, v, state, slots, prefix_lens, q_indptr, out, updates, totals, matrices, *head_strides(q, k, v),
        state.stride(0), len(q), first_entry, nodes, width, pairs, **key_constants, VALUE_DIM=shape.value_dim,
        **kinds(shape), ONE_BLOCK=nodes <= ROWS_PER_BLOCK, PARTS=state_parts(shape), PRECISE=precise,
        BLOCK_V=blocks.block_v, num_warps=blocks.num_warps, maxnreg=blocks.max_registers,
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
