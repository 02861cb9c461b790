"""Launch of the commit: states and windows of all layers over the accepted paths."""

from __future__ import annotations

import torch
import triton

from draftmark import Gate, StateShape

from ..heuristics.common import next_power_of_two
from ..kernel_variants import kernels, runs_compiled, select_variant
from ..launch.launcher import launch_kernel
from .sizing import StateBlocks

COMMIT_TENSORS = (
    *("state", "conv", "slots", "save_slots", "prefix_lens", "q_indptr", "accept_lens", "accept_index"),
    *("keys", "updates", "decays", "channels"),
)
"""Kernel parameters of the tensors of `launch_commit`, in order."""
WINDOW_ELEMENTS = 2048
"""Elements of a window that one program moves; a multiple of no window, so some threads stay idle."""
PATH_ROWS = 2
"""Rows of a path that are loaded together."""
SM90_BLOCK_V, SM90_WARPS, SM90_WINDOW_ELEMENTS = 32, 4, 512
"""Value elements, warps, and elements of a window of a program of `kernels_sm90.state_commit`."""
COMMIT_REGISTERS = 64
"""Registers of a thread; more programs of fewer registers keep more loads in flight."""


def launch_commit(
    shape: StateShape,
    blocks: StateBlocks,
    null_slots: int,
    interval: int,
    state: torch.Tensor,
    conv: torch.Tensor,
    slots: torch.Tensor,
    save_slots: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    accept_lens: torch.Tensor | None,
    accept_index: torch.Tensor | None,
    keys: torch.Tensor | None,
    updates: torch.Tensor | None,
    decays: torch.Tensor | None,
    channels: torch.Tensor,
) -> None:
    """Launch `kernels.state_commit.commit_rows`, one program for each tile of a slot.

    Args:
        interval: tokens between checkpoints; 0 for none.
        state, conv: tensors of the pool.
        save_slots, accept_lens, accept_index: None without checkpoints, and after EXTEND and DECODE.
        keys, updates, decays, channels: records; the first three are None for a layer without recurrence.
    """
    layers, _, num_channels, columns = conv.shape
    has_path, saves = accept_index is not None, save_slots is not None and interval > 0
    sm90 = has_path and blocks.sm90 and runs_compiled(conv)
    block_v = min(SM90_BLOCK_V, shape.value_dim) if sm90 else blocks.block_v
    most = (SM90_WINDOW_ELEMENTS if sm90 else WINDOW_ELEMENTS) if conv.is_cuda else 2**15
    block = min(most, next_power_of_two(max(1, num_channels * columns)))
    parts = triton.cdiv(shape.value_dim, block_v) * shape.num_heads
    parts += triton.cdiv(num_channels, block // columns) if columns else 0
    grid = parts, len(slots), layers
    arguments = (
        state, conv, slots, save_slots if saves else slots, prefix_lens, q_indptr, accept_lens if has_path else slots,
        accept_index if has_path else slots, channels if keys is None else keys,
        channels if updates is None else updates, channels if decays is None else decays, channels,
        *state.stride()[:2], *conv.stride(), null_slots, channels.shape[1], channels.shape[2], max(1, interval),
        int(saves),
    )  # fmt: skip
    constants = {
        "HEADS": shape.num_heads, "HEADS_PER_KEY": shape.heads_per_key, "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim, "KEY_GATE": shape.gate is Gate.KEY, "CONSTANT": shape.gate is Gate.CONSTANT,
        "NUM_CHANNELS": num_channels, "COLUMNS": columns, "BLOCK_V": block_v, "BLOCK": block,
    }  # fmt: skip
    if sm90:
        from .. import kernels_sm90

        launch_kernel(
            kernels_sm90.state_commit.commit_rows, grid, *arguments, **constants, WARPS=SM90_WARPS,
            num_warps=SM90_WARPS, maxnreg=COMMIT_REGISTERS,
        )  # fmt: skip
        return
    launch_kernel(
        select_variant(kernels.state_commit.commit_rows, conv), grid, *arguments, **constants, PATH=has_path,
        CHUNK=blocks.chunk, CHUNKS=blocks.chunks, UNROLL=PATH_ROWS, num_warps=blocks.num_warps,
        maxnreg=COMMIT_REGISTERS,
    )  # fmt: skip
