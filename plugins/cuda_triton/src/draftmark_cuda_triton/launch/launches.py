"""Kernel launches: one function per kernel that computes the grid, the constants and the arguments.

The host computes integers from shapes that a CUDA graph fixes. It neither reads device data nor allocates memory.
"""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..heuristics.common import OVERHEAD_TILES, KernelConfig, max_row_tiles, next_power_of_two, row_tiles
from ..heuristics.interpreted import INTERPRETED_KEYS
from ..heuristics.split_kv import MAX_SPLIT_ROW_TILES, MIN_SPLIT_TILES, split_costs
from ..heuristics.upcast import UPCAST_PAGE_SIZE
from ..kernel_variants import kernels, select_variant
from . import tma
from .launcher import launch_kernel, pdl_option
from .operands import BLOCK, CAUSAL, TREE, AttentionParams, BatchExtent, SplitBuffers

LOG2E = 1.4426950408889634
SCHEDULE_REQS, SCHEDULE_ROWS, SCHEDULE_SPLITS = 128, 64, 32
"""Requests that a write_metadata_decode_verify program reads at a time, and the rows and splits that it writes.

Its registers hold 4096 cells of the (split, request) comparison, and 8192 of the (row, request) comparison.
"""
PREFILL_REQS, PREFILL_ROWS = 32, 64
"""Requests that a write_metadata_prefill program reads at a time, and the rows and row tiles that it writes."""
SPLIT_TILES = 2 * MAX_SPLIT_ROW_TILES
"""Vector length for the row tiles of a split EXTEND batch: the bound of `max_row_tiles`."""
COMBINE_CELLS = {4: 2048, 16: 4096, 64: 2048}
"""Parts of a request that one step of a combine program reads → maximum fp32 values of the step; one kernel each.

A program is one warp and holds the values in registers. Its latency, not bandwidth, takes most of the time.
"""
UPCAST_CELLS = 8192
"""Maximum elements of K, and of V, that one program of `upcast_kv.upcast_pages` keeps in registers."""
UPCAST_REQS = 64
"""Preceding requests that an `upcast_pages` program reads in one step, to find its first upcast page."""


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
    grid = (max(triton.cdiv(extent.num_rows, SCHEDULE_ROWS), triton.cdiv(num_splits, SCHEDULE_SPLITS)),)
    launch_kernel(
        select_variant(kernels.tile_schedule.write_metadata_decode_verify, work), grid,
        prefix_lens, _or(q_indptr, prefix_lens), page_table, _or(engine_slots, slot_mapping), slot_mapping, work,
        extent.num_reqs, extent.num_rows, extent.uniform_q_len, extent.tail_len, num_splits, page_table.stride(0),
        shape.window_left, config.block_n, int(engine_slots is not None),
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
) -> None:
    """Launch `tile_schedule.write_metadata_prefill`: KV slots and row tiles of an EXTEND batch.

    Args:
        tiles: int32 ``[n, 2]``, output: header and row tiles.
        work: int32 ``[2 · num_splits, 4]``, output: the split schedule; None if row tiles are never split.
        num_splits: splits of the row tiles of each KV head; 1 if row tiles are never split.
        num_ctas: CTAs that are resident on the device.
    """
    num_reqs = prefix_lens.shape[0]
    num_tiles = max_row_tiles(config, shape.group, num_rows, num_reqs)
    grid = (max(triton.cdiv(max(num_rows, num_tiles), PREFILL_ROWS), triton.cdiv(num_splits, SCHEDULE_SPLITS)),)
    launch_kernel(
        select_variant(kernels.tile_schedule.write_metadata_prefill, tiles), grid, prefix_lens, q_indptr, page_table,
        _or(engine_slots, slot_mapping), slot_mapping, tiles, _or(work, tiles), num_reqs, num_rows, num_tiles,
        shape.group, shape.num_kv_heads, shape.l2_keys, page_table.stride(0), num_splits, num_ctas, shape.window_left,
        config.block_m, config.block_n, int(engine_slots is not None), PAGE_SIZE=shape.page_size, BLOCK_R=PREFILL_REQS,
        BLOCK=PREFILL_ROWS, WINDOW=shape.window, OVERHEAD_TILES=OVERHEAD_TILES, MIN_SPLIT_TILES=MIN_SPLIT_TILES,
        SPLIT_COST=split_costs(shape.value_width)[0], BLOCK_TILES=SPLIT_TILES, BLOCK_SPLITS=SCHEDULE_SPLITS,
    )  # fmt: skip


def attend_decode_verify(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    block: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    """Launch attention of a decode or verify batch, and the combine if the schedule can split requests.

    Args:
        mask, depth: ancestor mask and depths of a draft tree; None if the new tokens are a chain or a block.
        work, partial_out, partial_lse: schedule and partial results; see `sizing.split_buffers`.
        q_indptr: first row of each request of a ragged batch; None for uniform batches.
        block: every row of a request sees all new tokens (the tail) of the request.
        sinks: attention sink of each query head, or None; see `KVCache`.
    """
    shape = shape.merge_heads(config.kv_heads_per_tile)
    tiles = row_tiles(config, extent.q_len, shape.group)
    tree = mask is not None
    tail = TREE if tree else BLOCK if block else CAUSAL
    if shape.latent and config.num_consumer_wgs:
        _attend_latent_sm90(
            shape, config, extent, num_splits, q, k, v, prefix_lens, page_table, mask, depth, work, partial_out,
            partial_lse, out, lse, q_indptr, tail, sinks,
        )  # fmt: skip
    elif config.num_consumer_wgs:
        _attend_sm90(
            shape, config, extent, num_splits, q, k, v, k_scale, v_scale, prefix_lens, page_table, mask, depth, work,
            partial_out, partial_lse, out, lse, q_indptr, tail, sinks,
        )  # fmt: skip
    else:
        _attend_generic(
            shape, config, extent, num_splits, q, k, v, k_scale, v_scale, prefix_lens, page_table, mask, depth, work,
            partial_out, partial_lse, out, lse, q_indptr, tail, sinks,
        )  # fmt: skip
    if num_splits > 1 and not extent.whole_requests:
        _combine(
            shape, extent, num_splits, tiles * config.block_m, _or(q_indptr, prefix_lens), work, partial_out,
            partial_lse, out, lse, sinks,
        )  # fmt: skip


def _attend_generic(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    tail: int,
    sinks: torch.Tensor | None,
) -> None:
    tiles, tree = row_tiles(config, extent.q_len, shape.group), mask is not None
    launch_kernel(
        select_variant(kernels.decode_verify.attend_decode_verify, q), (tiles, shape.num_kv_heads, num_splits),
        q, _source(k, shape, config), _source(v, shape, config), k_scale, v_scale, sinks, out, lse,
        partial_out, partial_lse, work, prefix_lens, _or(q_indptr, prefix_lens), page_table,
        mask if tree else prefix_lens, depth if tree else prefix_lens,
        extent.q_len, extent.tail_len, extent.num_reqs, extent.num_rows, shape.group,
        0 if mask is None else mask.stride(0), shape.window_left,
        shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        page_table.stride(0), *k.stride()[:3], *v.stride()[:3],
        PAGE_SIZE=shape.page_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n, HEAD_DIM=shape.head_dim,
        BLOCK_D=shape.block_d, VALUE_DIM=shape.value_width, BLOCK_V=shape.block_v, LATENT=shape.latent,
        TAIL_KIND=tail, RAGGED=extent.ragged, WINDOW=shape.window, CAP=shape.cap > 0,
        SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None, USE_TMA=config.use_tma, WITH_LSE=lse is not None,
        OVERHEAD_TILES=OVERHEAD_TILES, PDL=shape.pdl, STAGES=config.num_stages, num_warps=config.num_warps,
        num_stages=config.num_stages, **pdl_option(shape.pdl),
    )  # fmt: skip


def _attend_sm90(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    tail: int,
    sinks: torch.Tensor | None,
) -> None:
    tiles, tree = row_tiles(config, extent.q_len, shape.group), mask is not None
    from .. import kernels_sm90

    if config.gather_kv:
        kernel = kernels_sm90.decode_verify_gather.attend_decode_verify_gather
    elif config.fp8_swap_ab:
        kernel = kernels_sm90.decode_verify_fp8.attend_decode_verify_fp8
    else:
        kernel = kernels_sm90.decode_verify.attend_decode_verify
    k, v = (tma.merge_heads(one, config.kv_heads_per_tile) for one in (k, v))
    kv, kv_strides = tma.kv_arguments(k, v, shape.page_size, config)
    launch_kernel(
        kernel,
        (tiles, shape.num_kv_heads, num_splits), q, *kv, _or(k_scale, q), _or(v_scale, q), _or(sinks, q), out,
        _or(lse, partial_lse), partial_out, partial_lse, work, prefix_lens, _or(q_indptr, prefix_lens), page_table,
        mask if tree else prefix_lens, depth if tree else prefix_lens, extent.uniform_q_len, extent.tail_len,
        extent.num_reqs, extent.num_rows, shape.group, 0 if mask is None else mask.stride(0), shape.window_left,
        shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1), page_table.stride(0),
        *kv_strides,
        PAGE_SIZE=shape.page_size, BLOCK_N=config.block_n, HEAD_DIM=shape.head_dim, TAIL_KIND=tail,
        WINDOW=shape.window, CAP=shape.cap > 0, SCALED=scaled(k_scale, v_scale),
        SINKS=sinks is not None, WITH_LSE=lse is not None, OVERHEAD_TILES=OVERHEAD_TILES, PDL=shape.pdl,
        STAGES=config.num_stages, KV_HEADS_PER_TILE=config.kv_heads_per_tile, STRIDE_ALIGN=_stride_align(q, out),
        **tma.kernel_options(config, k, q, shape.page_size), **pdl_option(shape.pdl),
    )  # fmt: skip


def _attend_latent_sm90(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    q: torch.Tensor,
    value: torch.Tensor,
    rest: torch.Tensor,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    tail: int,
    sinks: torch.Tensor | None,
) -> None:
    tiles, tree = row_tiles(config, extent.q_len, shape.group), mask is not None
    from .. import kernels_sm90

    width, box_keys = shape.value_width, tma.box_keys(shape.page_size, config)
    value_boxes = tma.latent_descriptor(value, box_keys, width)
    rest_boxes = tma.latent_descriptor(rest, box_keys, shape.head_dim - width) if width < shape.head_dim else None
    launch_kernel(
        kernels_sm90.latent.attend_latent, (tiles, 1, num_splits), q, value_boxes, rest_boxes, _or(sinks, q), out,
        _or(lse, partial_lse), partial_out, partial_lse, work, prefix_lens, _or(q_indptr, prefix_lens), page_table,
        mask if tree else prefix_lens, depth if tree else prefix_lens, extent.uniform_q_len, extent.tail_len,
        extent.num_reqs, extent.num_rows, shape.group, 0 if mask is None else mask.stride(0), shape.window_left,
        shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1), page_table.stride(0),
        value.shape[0], PAGE_SIZE=shape.page_size, BLOCK_N=config.block_n, BOX_KEYS=box_keys, VALUE_DIM=width,
        REST_DIM=shape.head_dim - width, TAIL_KIND=tail, WINDOW=shape.window, CAP=shape.cap > 0,
        SINKS=sinks is not None, WITH_LSE=lse is not None, OVERHEAD_TILES=OVERHEAD_TILES, PDL=shape.pdl,
        STAGES=config.num_stages, STRIDE_ALIGN=_stride_align(q, out), num_warps=config.num_warps,
        **pdl_option(shape.pdl),
    )  # fmt: skip


def has_aligned_rows(q: torch.Tensor) -> bool:
    """Check whether each head of each row of q starts at a multiple of 16 bytes."""
    return all(step % 16 == 0 for step in (q.data_ptr(), *(stride * q.element_size() for stride in q.stride()[:2])))


def _combine(
    shape: AttentionParams,
    extent: BatchExtent,
    num_splits: int,
    partial_rows: int,
    q_indptr: torch.Tensor,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    kernel = select_variant(kernels.combine.combine_splits, out)
    # In prefill, an item is one row tile.
    rows = extent.q_len * shape.group or partial_rows
    most_rows = shape.max_q_len * shape.group if extent.q_len else partial_rows
    compiled = isinstance(kernel, triton.JITFunction)
    blocks, constants = combine_grid(shape, num_splits // extent.num_reqs + 2, rows, most_rows, compiled)
    launch_kernel(
        kernel, (blocks, shape.num_kv_heads, min(extent.num_reqs, num_splits - 1)),
        partial_out, partial_lse, work, q_indptr, sinks, out, lse, extent.uniform_q_len,
        shape.group, num_splits, partial_rows, out.stride(0), out.stride(1), _row_stride(lse),
        SINKS=sinks is not None, WITH_LSE=lse is not None, PDL=shape.pdl, EVERY_REQUEST=False, num_warps=1, **constants,
        **pdl_option(shape.pdl),
    )  # fmt: skip


def combine_grid(
    shape: AttentionParams, parts: int, rows: int, most_rows: int, compiled: bool
) -> tuple[int, dict[str, int]]:
    """Return the programs of a request's combine, and the kernel's constants for blocks of rows, columns and parts.

    Args:
        parts: largest number of parts of a request.
        rows: packed rows of a request.
        most_rows: packed rows of a request in any batch; the blocks follow it.
    """
    block_splits = next((size for size in COMBINE_CELLS if parts <= size), max(COMBINE_CELLS))
    cells = COMBINE_CELLS[block_splits]
    if not compiled:
        # An interpreted program costs milliseconds for any size, so it combines more cells (rows x columns).
        cells, most_rows = 16 * cells, rows
    block_cols = min(max(16, next_power_of_two(shape.value_width)), max(32, cells // block_splits))
    block_rows = max(1, min(next_power_of_two(most_rows), cells // (block_splits * block_cols)))
    blocks = triton.cdiv(rows, block_rows) * triton.cdiv(shape.value_width, block_cols)
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "BLOCK_SPLITS": block_splits}
    return blocks, {"VALUE_DIM": shape.value_width} | sizes


def attend_prefill(
    shape: AttentionParams,
    config: KernelConfig,
    num_rows: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    split: SplitBuffers | None = None,
) -> None:
    """Launch ragged causal attention of an EXTEND batch, and the combine if row tiles can be split.

    Args:
        tiles: header and row tiles that `write_metadata_prefill` wrote.
        split: splits and buffers for row tiles that can be split along the keys; None if they are never split.
    """
    count = max_row_tiles(config, shape.group, num_rows, prefix_lens.shape[0])
    if split is not None:
        _attend_row_tiles(
            shape, config, max(split.num_splits, count), q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table,
            tiles, out, lse, sinks, split.partial_out, split.partial_lse, split.work, split.num_splits,
        )  # fmt: skip
        batch = BatchExtent(count, 0, 0, num_rows, ragged=True)
        _combine(
            shape, batch, split.num_splits, config.block_m, q_indptr, split.work, split.partial_out,
            split.partial_lse, out, lse, sinks,
        )  # fmt: skip
        return
    _attend_row_tiles(
        shape, config, count, q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table, tiles, out, lse, sinks, out,
        out, tiles, 1,
    )  # fmt: skip


def _attend_row_tiles(
    shape: AttentionParams,
    config: KernelConfig,
    num_tiles: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    work: torch.Tensor,
    num_splits: int,
) -> None:
    split, num_ctas = num_splits > 1, shape.num_kv_heads * num_tiles
    pdl = split and shape.pdl
    if config.num_consumer_wgs:
        from .. import kernels_sm90

        grid = (min(num_ctas, tma.num_resident_ctas(q, config)),)
        kv, kv_strides = tma.kv_arguments(k, v, shape.page_size, config)
        if config.gather_kv:
            kernel = kernels_sm90.prefill_gather.attend_prefill_gather
        else:
            kernel = kernels_sm90.prefill.attend_prefill
        launch_kernel(
            kernel, grid, q, *kv,
            _or(k_scale, q), _or(v_scale, q), _or(sinks, q), out, _or(lse, q), partial_out, partial_lse, work, tiles,
            prefix_lens, q_indptr, page_table, shape.group, shape.num_kv_heads, shape.window_left, shape.scale * LOG2E,
            shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1), _row_stride(lse), page_table.stride(0),
            *kv_strides, num_splits, PAGE_SIZE=shape.page_size, BLOCK_N=config.block_n, HEAD_DIM=shape.head_dim,
            WINDOW=shape.window, CAP=shape.cap > 0, SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None,
            WITH_LSE=lse is not None, SPLIT_KV=split, OVERHEAD_TILES=OVERHEAD_TILES, PDL=pdl, STAGES=config.num_stages,
            STRIDE_ALIGN=_stride_align(q, out), **tma.kernel_options(config, k, q, shape.page_size), **pdl_option(pdl),
        )  # fmt: skip
        return
    launch_kernel(
        select_variant(kernels.prefill.attend_prefill, q), (num_ctas,), q, _source(k, shape, config),
        _source(v, shape, config), k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, tiles,
        prefix_lens, q_indptr, page_table, shape.group, shape.num_kv_heads, shape.window_left, shape.scale * LOG2E,
        shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1), _row_stride(lse), page_table.stride(0),
        *k.stride()[:3], *v.stride()[:3], num_splits, PAGE_SIZE=shape.page_size, BLOCK_M=config.block_m,
        BLOCK_M_POW2=next_power_of_two(config.block_m), BLOCK_N=config.block_n, HEAD_DIM=shape.head_dim,
        BLOCK_D=shape.block_d, VALUE_DIM=shape.value_width, BLOCK_V=shape.block_v, LATENT=shape.latent,
        WINDOW=shape.window, CAP=shape.cap > 0, SCALED=scaled(k_scale, v_scale),
        SINKS=sinks is not None, USE_TMA=config.use_tma, WITH_LSE=lse is not None, SPLIT_KV=split,
        OVERHEAD_TILES=OVERHEAD_TILES, PDL=pdl, STAGES=config.num_stages, num_warps=config.num_warps,
        num_stages=config.num_stages, **pdl_option(pdl),
    )  # fmt: skip


def upcast_kv(
    shape: AttentionParams,
    all_heads: int,
    pages_per_request: int,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    upcast_k: torch.Tensor,
    upcast_v: torch.Tensor,
    upcast_table: torch.Tensor,
) -> None:
    """Launch `upcast_kv.upcast_pages`: write K and V of a ragged batch in q's dtype, with a page table.

    Args:
        shape: attention of the group of KV heads to convert.
        all_heads: KV heads of all groups.
        pages_per_request: pages of UPCAST_PAGE_SIZE keys of the longest request, the width of upcast_table.
        upcast_k, upcast_v: ``[pages, UPCAST_PAGE_SIZE, KV heads, head_dim]``, outputs.
        upcast_table: int32 ``[R, pages_per_request]``, output.
    """
    kernel = select_variant(kernels.upcast_kv.upcast_pages, k)
    block = next_power_of_two(all_heads * shape.head_dim)
    # An interpreted program costs milliseconds for any size, so it converts a full page.
    max_tokens = max(1, UPCAST_CELLS // block) if isinstance(kernel, triton.JITFunction) else UPCAST_PAGE_SIZE
    tokens = min(max_tokens, UPCAST_PAGE_SIZE)
    launch_kernel(
        kernel, (pages_per_request * UPCAST_PAGE_SIZE // tokens, prefix_lens.shape[0]), k, v, prefix_lens, q_indptr,
        page_table, upcast_k, upcast_v, upcast_table, pages_per_request, shape.window_left, page_table.stride(0),
        *k.stride()[:3], *v.stride()[:3], shape.num_kv_heads, BLOCK_REQS=UPCAST_REQS, PAGE_SIZE=shape.page_size,
        UPCAST_PAGE_SIZE=UPCAST_PAGE_SIZE, HEAD_DIM=shape.head_dim, WINDOW=shape.window,
        ALIGN_KEYS=INTERPRETED_KEYS, BLOCK=block, BLOCK_TOKENS=tokens,
    )  # fmt: skip


def scaled(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    """Return the kernels' SCALED constant: bit 0 if K has a scale, bit 1 if V has one. A missing scale is 1."""
    return (k_scale is not None) + 2 * (v_scale is not None)


def _stride_align(q: torch.Tensor, out: torch.Tensor) -> int:
    """Return the number of elements in 16 bytes if it divides q's and out's row and head strides; else 1."""
    elements = 16 // q.element_size()
    return elements if all(stride % elements == 0 for stride in (*q.stride()[:2], *out.stride()[:2])) else 1


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or `other` as a placeholder pointer for an argument that the kernel does not read."""
    return other if tensor is None else tensor


def _row_stride(lse: torch.Tensor | None) -> int:
    """Return the elements between two rows of the lse; 0 if the kernel does not store it."""
    return 0 if lse is None else lse.stride(0)


def _source(cache: torch.Tensor, shape: AttentionParams, config: KernelConfig) -> torch.Tensor | TensorDescriptor:
    """Return the cache, or with use_tma a descriptor of ``[slots, heads · dim]`` with one KV tile a box."""
    if not config.use_tma:
        return cache
    pages, page_size, kv_heads_per_tile, dim = cache.shape
    return TensorDescriptor(
        cache, [pages * page_size, kv_heads_per_tile * dim], [cache.stride(1), 1], [config.block_n, dim]
    )
