"""Launches of the schedule kernels: KV slots and schedules. The host reads no device data and allocates nothing."""

from __future__ import annotations

import torch

from draftmark import ceil_div

from ..heuristics.common import OVERHEAD_TILES, KernelConfig, max_row_tiles
from ..heuristics.split_kv import MAX_SPLIT_ROW_TILES, MIN_SPLIT_TILES, split_costs
from ..kernel_variants import kernels, select_variant
from .launcher import launch_kernel
from .operands import AttentionParams, BatchExtent, or_placeholder
from .prepared import PreparedKernel

SCHEDULE_REQS, SCHEDULE_ROWS, SCHEDULE_SPLITS = 128, 64, 32
"""Requests that a write_metadata_decode_verify program reads at a time, and the rows and splits that it writes.

Its registers hold 4096 cells of the (split, request) comparison, and 8192 of the (row, request) comparison.
"""
PREFILL_REQS, PREFILL_ROWS = 32, 64
"""Requests that a write_metadata_prefill program reads at a time, and the rows and row tiles that it writes."""
SPLIT_TILES = 2 * MAX_SPLIT_ROW_TILES
"""Vector length for the row tiles of a split EXTEND batch: the bound of `max_row_tiles`."""


def write_metadata_decode_verify(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    work: torch.Tensor,
    q_indptr: torch.Tensor | None = None,
    engine_slots: torch.Tensor | None = None,
) -> None:
    """Launch `tile_schedule.write_metadata_decode_verify`: KV slots and split-KV schedule of a decode or verify batch.

    Args:
        work: int32 ``[2 · num_splits, 4]``, or ``[num_reqs, 4]`` with whole requests; output: the schedule.
        q_indptr: int32 ``[R + 1]``, first row of each request of a ragged batch; None for uniform batches.
        engine_slots: int64 slots of the engine, copied to slot_mapping; None to compute slots from the page table.
    """
    grid = (max(ceil_div(extent.num_rows, SCHEDULE_ROWS), ceil_div(num_splits, SCHEDULE_SPLITS)),)
    launch_kernel(
        select_variant(kernels.tile_schedule.write_metadata_decode_verify, work), grid,
        prefix_lens, or_placeholder(q_indptr, prefix_lens), page_table, or_placeholder(engine_slots, slot_mapping),
        slot_mapping, work, extent.num_reqs, extent.num_rows, extent.uniform_q_len, extent.tail_len, num_splits,
        page_table.stride(0), shape.window_left, config.block_n, int(engine_slots is not None),
        PAGE_SIZE=shape.page_size, WINDOW=shape.window, OVERHEAD_TILES=OVERHEAD_TILES, BLOCK_R=SCHEDULE_REQS,
        BLOCK_ROWS=SCHEDULE_ROWS, BLOCK_SPLITS=SCHEDULE_SPLITS, WHOLE_REQUESTS=extent.whole_requests,
    )  # fmt: skip


def write_metadata_prefill(
    shape: AttentionParams,
    config: KernelConfig,
    num_rows: int,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tiles: torch.Tensor,
    engine_slots: torch.Tensor | None = None,
    work: torch.Tensor | None = None,
    num_splits: int = 1,
    num_ctas: int = 1,
    prepared: PreparedKernel | None = None,
) -> None:
    """Launch `prefill_schedule.write_metadata_prefill`: KV slots and row tiles of an EXTEND batch.

    Args:
        tiles: int32 ``[n, 2]``, output: header and row tiles.
        work: int32 ``[2 · num_splits, 4]``, output: the split schedule; None if row tiles are never split.
        num_splits: splits of the row tiles of each KV head; 1 if row tiles are never split.
        num_ctas: CTAs that are resident on the device.
        prepared: repeats launches of this kernel for this shape without Triton's argument binding; None for Triton's
            launcher.
    """
    num_reqs = prefix_lens.shape[0]
    num_tiles = max_row_tiles(config, shape.group, num_rows, num_reqs)
    # The host calls this in every step with a prompt, so it calls few functions.
    grid = (max(-(-num_rows // PREFILL_ROWS), -(-num_tiles // PREFILL_ROWS), -(-num_splits // SCHEDULE_SPLITS)),)
    args = (
        prefix_lens, q_indptr, page_table, slot_mapping if engine_slots is None else engine_slots, slot_mapping, tiles,
        tiles if work is None else work, num_reqs, num_rows, num_tiles, shape.group, shape.num_kv_heads, shape.l2_keys,
        page_table.stride(0), num_splits, num_ctas, shape.window_left, config.block_m, config.block_n,
        0 if engine_slots is None else 1,
    )  # fmt: skip
    if prepared is not None and prepared.again(grid, args):
        return
    (prepared or launch_kernel)(
        select_variant(kernels.prefill_schedule.write_metadata_prefill, tiles), grid, *args, PAGE_SIZE=shape.page_size,
        BLOCK_R=PREFILL_REQS, BLOCK=PREFILL_ROWS, WINDOW=shape.window, OVERHEAD_TILES=OVERHEAD_TILES,
        MIN_SPLIT_TILES=MIN_SPLIT_TILES, SPLIT_COST=split_costs(shape.value_width)[0], BLOCK_TILES=SPLIT_TILES,
        BLOCK_SPLITS=SCHEDULE_SPLITS,
    )  # fmt: skip
