"""Launch of `kernels.combine`: partial results of split requests, row tiles or lists become out and lse."""

from __future__ import annotations

import torch
import triton

from draftmark import ceil_div

from ..heuristics.common import next_power_of_two
from ..kernel_variants import kernels, select_variant
from .launcher import launch_kernel, pdl_option
from .operands import AttentionParams, ChosenOperands, Operands, PartialResults

COMBINE_CELLS = {2: 1024, 4: 2048, 8: 4096, 16: 4096, 32: 2048, 64: 2048}
"""Parts of a request that one step of a combine program reads → maximum fp32 values of the step.

A program is one warp and holds the values in registers. Its latency, not bandwidth, takes most of the time. One
compiled kernel serves two neighbouring numbers of parts: 2 and 4, 8 and 16, or 32 and 64.
"""


def combine_splits(
    shape: AttentionParams,
    t: Operands | ChosenOperands,
    partials: PartialResults,
    q_indptr: torch.Tensor,
    *,
    items: int,
    parts: int,
    q_len: int,
    rows: int,
    most_rows: int,
    num_splits: int,
    partial_rows: int,
    every_request: bool = False,
) -> None:
    """Launch `combine.combine_splits` for items that can be split: requests, row tiles of prefill, or rows with lists.

    Args:
        items: items that can have several parts, the grid's last extent.
        parts: largest number of parts of an item.
        q_len: rows of each item; 0 if q_indptr has the row ranges.
        rows, most_rows: packed rows of an item, and of an item in any batch.
        num_splits: splits of the batch, or of each item with every_request.
        partial_rows: packed rows of an item's part in `partials`.
        every_request: every item has num_splits parts, and `partials.work` is not read.
    """
    kernel = select_variant(kernels.combine.combine_splits, t.out)
    blocks, use_half, constants = combine_grid(shape, parts, rows, most_rows, isinstance(kernel, triton.JITFunction))
    launch_kernel(
        kernel, (blocks, shape.num_kv_heads, items), partials.out, partials.lse, partials.work, q_indptr, t.sinks,
        t.out, t.lse, q_len, shape.group, num_splits, partial_rows, t.out.stride(0), t.out.stride(1),
        0 if t.lse is None else t.lse.stride(0), use_half, SINKS=t.sinks is not None, WITH_LSE=t.lse is not None,
        PDL=shape.pdl, EVERY_REQUEST=every_request, num_warps=1, **constants, **pdl_option(shape.pdl),
    )  # fmt: skip


def combine_grid(
    shape: AttentionParams, parts: int, rows: int, most_rows: int, compiled: bool
) -> tuple[int, int, dict[str, int]]:
    """Return the programs of a request's combine, `use_half`, and the kernel's constants for blocks.

    Args:
        parts: largest number of parts of a request.
        rows: packed rows of a request.
        most_rows: packed rows of a request in any batch; the blocks follow it.
    """
    block_splits = next((size for size in (4, 16) if parts <= size), max(COMBINE_CELLS))
    use_half = int(parts <= block_splits // 2)
    most_rows = most_rows if compiled else rows
    whole, half = (_block(shape, step, most_rows, compiled) for step in (block_splits, block_splits // 2))
    block_rows, block_cols = half if use_half else whole
    blocks = ceil_div(rows, block_rows) * ceil_div(shape.value_width, block_cols)
    sizes = {"BLOCK_ROWS": whole[0], "BLOCK_COLS": whole[1], "HALF_ROWS": half[0], "HALF_COLS": half[1]}
    return blocks, use_half, {"VALUE_DIM": shape.value_width, **sizes, "BLOCK_SPLITS": block_splits}


def _block(shape: AttentionParams, parts: int, most_rows: int, compiled: bool) -> tuple[int, int]:
    """Return the rows and columns that one program combines if each of its steps reads `parts` parts."""
    # An interpreted program costs milliseconds for any size, so it combines more cells (rows x columns).
    cells = COMBINE_CELLS[parts] if compiled else 16 * COMBINE_CELLS[parts]
    block_cols = min(max(16, next_power_of_two(shape.value_width)), max(32, cells // parts))
    return max(1, min(next_power_of_two(most_rows), cells // (parts * block_cols))), block_cols
