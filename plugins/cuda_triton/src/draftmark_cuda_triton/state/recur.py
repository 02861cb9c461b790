"""Launches of the recurrence of a layer: rows in place, and the verify of chains and trees."""

from __future__ import annotations

from math import gcd

import torch
import triton

from draftmark import Gate, Recurrence, StateShape
from draftmark.runtime import ForwardBatch

from ..kernel_variants import kernels, runs_compiled, select_variant
from ..launch.launcher import launch_kernel, pdl_option
from .sizing import ROWS_PER_BLOCK, StateBlocks, VerifyBlocks, state_parts

VERIFY_TENSORS = (
    *("q", "k", "v", "log_decay", "beta", "state", "slots", "prefix_lens", "q_indptr", "out", "mask"),
    *("keys", "updates", "decays", "totals", "matrices"),
)
"""Kernel parameters of the tensors of `launch_verify`, in order."""
KEYS_PER_STEP = 32
"""Key elements that `kernels.state_pairs_by_key` computes together: a warp has no registers for more."""
MAX_SHARED_HEADS = 4
"""Most heads for which a program of `kernels.state_pairs` multiplies keys and queries once."""
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
    blocks: VerifyBlocks,
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
    """Launch the kernel of the matrices among rows, then that of the rows, over `row_tensors` first.

    On Hopper the second one is a programmatic dependent launch: it loads the state while the first one runs.

    Args:
        layer: index of the layer in its pool.
        mask: `Tree.mask`, or None for chains.
        keys, updates, decays, totals, matrices: buffers of `sizing.state_buffers`.
    """
    _, max_reqs, nodes = keys.shape[:3]
    sm90 = blocks.sm90 and runs_compiled(q)
    pairs, width, first_entry = matrices.shape[2], matrices.shape[4], layer * max_reqs
    precise, one_block = shape.dtype == "float32", nodes <= ROWS_PER_BLOCK
    dims = {"HEADS_PER_KEY": shape.heads_per_key, "KEY_DIM": shape.key_dim}
    if shape.gate is Gate.KEY:
        pairs_kernel = kernels.state_pairs_by_key.verify_pairs_by_key
        heads, own = 1, {"CHUNK": min(KEYS_PER_STEP, blocks.block_k)}
    else:
        heads = 1 if shape.recurrence is Recurrence.DELTA else gcd(shape.heads_per_key, MAX_SHARED_HEADS)
        pairs_kernel = kernels.state_pairs.verify_pairs
        own = {"HEADS": heads, "CONSTANT": shape.gate is Gate.CONSTANT}
    launch_kernel(
        select_variant(pairs_kernel, q), (pairs, shape.num_heads // heads, len(slots)),
        q, k, log_decay, q if beta is None else beta, q_indptr, slots if mask is None else mask, keys, decays, totals,
        matrices, *head_strides(q, k), *decay_strides(shape, log_decay), 0 if beta is None else beta.stride(0),
        first_entry, nodes, width, 0 if mask is None else mask.stride(0), int(mask is not None), layer, **dims,
        DELTA=shape.recurrence is Recurrence.DELTA, **own, PRECISE=precise, BLOCK_K=blocks.block_k,
        ONE_BLOCK=one_block, PDL=sm90, num_warps=1, num_stages=1,
    )  # fmt: skip
    grid = triton.cdiv(shape.value_dim, blocks.block_v), shape.num_heads, len(slots)
    tensors = q, k, v, state, slots, prefix_lens, q_indptr, out, updates, totals, matrices
    numbers = *head_strides(q, k, v), state.stride(0), len(q), first_entry, nodes, width, pairs
    constants = {**dims, "VALUE_DIM": shape.value_dim, **kinds(shape), "BLOCK_V": blocks.block_v}
    if sm90:
        from .. import kernels_sm90

        launch_kernel(
            kernels_sm90.state_verify.recur_verify, grid, *tensors, *numbers, **constants,
            BLOCKS=triton.cdiv(nodes, ROWS_PER_BLOCK), PARTS=0 if shape.gate is Gate.KEY else state_parts(shape),
            WARPS=blocks.num_warps, num_warps=blocks.num_warps, maxnreg=blocks.max_registers, **pdl_option(True),
        )  # fmt: skip
        return
    launch_kernel(
        select_variant(kernels.state_verify.recur_verify, q), grid, *tensors, *numbers, **constants,
        BLOCK_K=blocks.block_k, ONE_BLOCK=one_block, PARTS=state_parts(shape), PRECISE=precise,
        num_warps=blocks.num_warps, maxnreg=blocks.max_registers,
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
