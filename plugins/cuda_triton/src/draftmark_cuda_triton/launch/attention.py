"""Launches of the attention kernels: one function per kernel that computes the grid, the arguments and the constants.

The host computes integers from shapes that a CUDA graph fixes. It neither reads device data nor allocates memory.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..heuristics import latent
from ..heuristics.common import OVERHEAD_TILES, Kernel, KernelConfig, max_row_tiles, next_power_of_two, row_tiles
from ..kernel_variants import kernels, select_variant
from . import tma
from .combine import combine_splits
from .launcher import launch_kernel, pdl_option
from .operands import (
    BLOCK,
    CAUSAL,
    TREE,
    AttentionParams,
    BatchExtent,
    ChosenOperands,
    Operands,
    PartialResults,
    SplitBuffers,
    or_placeholder,
    scaled,
)

LOG2E = 1.4426950408889634


def attend_decode_verify(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    t: Operands,
    partials: PartialResults,
    block: bool = False,
) -> None:
    """Launch attention of a decode or verify batch, and the combine if the schedule can split requests.

    Args:
        partials: schedule and partial results; see `sizing.split_buffers`.
        block: every row of a request sees all new tokens (the tail) of the request.
    """
    shape = shape.merge_heads(config.kv_heads_per_tile)
    tail = BLOCK if block else CAUSAL
    if t.tail_mask is not None:
        tail = TREE
    attend = _attend_generic
    if config.kernel.is_sm90:
        attend = _attend_latent_sm90 if config.kernel.is_latent else _attend_sm90
    attend(shape, config, extent, num_splits, t, partials, tail)
    if num_splits > 1 and not extent.whole_requests:
        rows = extent.q_len * shape.group
        combine_splits(
            shape, t, partials, or_placeholder(t.q_indptr, t.prefix_lens), items=min(extent.num_reqs, num_splits - 1),
            parts=num_splits // extent.num_reqs + 2, q_len=extent.uniform_q_len, rows=rows,
            most_rows=shape.max_q_len * shape.group, num_splits=num_splits,
            partial_rows=row_tiles(config, extent.q_len, shape.group) * config.block_m,
        )  # fmt: skip


def _attend_generic(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    t: Operands,
    partials: PartialResults,
    tail: int,
) -> None:
    tiles = row_tiles(config, extent.q_len, shape.group)
    launch_kernel(
        select_variant(kernels.decode_verify.attend_decode_verify, t.q), (tiles, shape.num_kv_heads, num_splits),
        t.q, _source(t.k_source, shape, config), _source(t.v_source, shape, config), t.k_scale, t.v_scale, t.sinks,
        t.out, t.lse, *_batch_arguments(shape, extent, t, partials, extent.q_len), *t.k_source.stride()[:3],
        *t.v_source.stride()[:3], BLOCK_M=config.block_m, TAIL_KIND=tail, RAGGED=extent.ragged,
        **generic_constants(shape, config, t), USE_TMA=config.kernel is Kernel.BOXES,
        **_constants(shape, config, t, shape.pdl),
    )  # fmt: skip


def _attend_sm90(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    t: Operands,
    partials: PartialResults,
    tail: int,
) -> None:
    from .. import kernels_sm90

    if config.kernel is Kernel.SM90_GATHER:
        kernel = kernels_sm90.decode_verify_gather.attend_decode_verify_gather
    elif config.kernel is Kernel.SM90_FP8:
        kernel = kernels_sm90.decode_verify_fp8.attend_decode_verify_fp8
    else:
        kernel = kernels_sm90.decode_verify.attend_decode_verify
    q, heads, tiles = t.q, config.kv_heads_per_tile, row_tiles(config, extent.q_len, shape.group)
    k, v = (tma.merge_heads(one, heads) for one in (t.k_source, t.v_source))
    kv, kv_strides = tma.kv_arguments(k, v, shape.page_size, config)
    launch_kernel(
        kernel, (tiles, shape.num_kv_heads, num_splits), q, *kv, or_placeholder(t.k_scale, q),
        or_placeholder(t.v_scale, q), or_placeholder(t.sinks, q), t.out, or_placeholder(t.lse, partials.lse),
        *_batch_arguments(shape, extent, t, partials, extent.uniform_q_len), *kv_strides, TAIL_KIND=tail,
        KV_HEADS_PER_TILE=heads, **_sm90_constants(shape, config, t, k), **_constants(shape, config, t, shape.pdl),
    )  # fmt: skip


def _attend_latent_sm90(
    shape: AttentionParams,
    config: KernelConfig,
    extent: BatchExtent,
    num_splits: int,
    t: Operands,
    partials: PartialResults,
    tail: int,
) -> None:
    from .. import kernels_sm90

    grid = (row_tiles(config, extent.q_len, shape.group), 1, num_splits)
    width, box_keys = shape.value_width, tma.box_keys(shape.page_size, config)
    rest_dim = shape.head_dim - width
    swapped = config.kernel is Kernel.SM90_LATENT_SWAP_AB
    value = tma.latent_descriptor(t.k_source, box_keys, width, tma.SWIZZLE_BYTES // (1 if swapped else 2))
    rest = tma.latent_descriptor(t.v_source, box_keys, rest_dim) if rest_dim > 0 else None
    batch = (*_batch_arguments(shape, extent, t, partials, extent.uniform_q_len), t.k_source.shape[0])
    constants = {
        "BOX_KEYS": box_keys, "VALUE_DIM": width, "REST_DIM": rest_dim, "TAIL_KIND": tail,
        "STRIDE_ALIGN": _stride_align(t.q, t.out), "num_warps": config.num_warps,
        **_constants(shape, config, t, shape.pdl),
    }  # fmt: skip
    if config.kernel is Kernel.SM90_LATENT:
        launch_kernel(
            kernels_sm90.latent.attend_latent, grid, t.q, value, rest, or_placeholder(t.sinks, t.q), t.out,
            or_placeholder(t.lse, partials.lse), *batch, **constants,
        )  # fmt: skip
        return
    q = tma.query_descriptor(t.q, width, config.block_m)
    q_rest = tma.query_descriptor(t.q, rest_dim, config.block_m) if rest_dim > 0 else None
    if swapped:
        launch_kernel(
            kernels_sm90.latent_swap_ab.attend_latent_swap_ab, grid, t.out, q, q_rest, value, rest,
            *(or_placeholder(one, partials.lse) for one in (t.k_scale, t.v_scale, t.sinks, t.lse)), *batch, **constants,
            BLOCK_M=config.block_m, SCALED=scaled(t.k_scale, t.v_scale),
        )  # fmt: skip
        return
    launch_kernel(
        kernels_sm90.latent_rs.attend_latent_rs, grid, t.out, q, q_rest, value, rest,
        *(or_placeholder(one, partials.lse) for one in (t.k_scale, t.v_scale, t.sinks, t.lse)), *batch, **constants,
        REST_STAGES=latent.rs_rest_stages(width, config.block_n, config.num_fp8_stages),
        RAW_CHUNKS=config.num_fp8_stages, SCALED=scaled(t.k_scale, t.v_scale),
    )  # fmt: skip


def _batch_arguments(
    shape: AttentionParams, extent: BatchExtent, t: Operands, partials: PartialResults, q_len: int
) -> tuple[Any, ...]:
    """Return the arguments that every kernel of decode and verify takes after lse, up to the page table's stride."""
    lens, mask = t.prefix_lens, t.tail_mask
    return (
        partials.out, partials.lse, partials.work, lens, or_placeholder(t.q_indptr, lens), t.page_table,
        or_placeholder(mask, lens), or_placeholder(t.tail_depth, lens), q_len, extent.tail_len, extent.num_reqs,
        extent.num_rows, shape.group, 0 if mask is None else mask.stride(0), shape.window_left, shape.scale * LOG2E,
        shape.cap, t.q.stride(0), t.q.stride(1), t.out.stride(0), t.out.stride(1), t.page_table.stride(0),
    )  # fmt: skip


def attend_prefill(
    shape: AttentionParams,
    config: KernelConfig,
    num_rows: int,
    t: Operands,
    tiles: torch.Tensor,
    split: SplitBuffers | None = None,
) -> None:
    """Launch ragged causal attention of an EXTEND batch, and the combine if row tiles can be split.

    Args:
        tiles: header and row tiles that `write_metadata_prefill` wrote.
        split: splits and buffers for row tiles that can be split along the keys; None if they are never split.
    """
    count = max_row_tiles(config, shape.group, num_rows, t.prefix_lens.shape[0])
    attend = _attend_row_tiles_sm90 if config.kernel.is_sm90 else _attend_row_tiles
    if split is None:
        attend(shape, config, shape.num_kv_heads * count, t, tiles, PartialResults(tiles, t.out, t.out), 1)
        return
    num_splits, partials, block_m = split.num_splits, split.partials, config.block_m
    attend(shape, config, shape.num_kv_heads * max(num_splits, count), t, tiles, partials, num_splits)
    assert t.q_indptr is not None
    combine_splits(
        shape, t, partials, t.q_indptr, items=min(count, num_splits - 1), parts=num_splits // count + 2, q_len=0,
        rows=block_m, most_rows=block_m, num_splits=num_splits, partial_rows=block_m,
    )  # fmt: skip


def _attend_row_tiles_sm90(
    shape: AttentionParams,
    config: KernelConfig,
    num_ctas: int,
    t: Operands,
    tiles: torch.Tensor,
    partials: PartialResults,
    num_splits: int,
) -> None:
    from .. import kernels_sm90

    gathers, q, split = config.kernel is Kernel.SM90_GATHER, t.q, num_splits > 1
    kernel = kernels_sm90.prefill_gather.attend_prefill_gather if gathers else kernels_sm90.prefill.attend_prefill
    kv, kv_strides = tma.kv_arguments(t.k_source, t.v_source, shape.page_size, config)
    launch_kernel(
        kernel, (min(num_ctas, tma.num_resident_ctas(q, config)),), q, *kv, or_placeholder(t.k_scale, q),
        or_placeholder(t.v_scale, q), or_placeholder(t.sinks, q), t.out, or_placeholder(t.lse, q),
        *_row_tile_arguments(shape, t, tiles, partials), *kv_strides, num_splits, SPLIT_KV=split,
        **_sm90_constants(shape, config, t, t.k_source), **_constants(shape, config, t, split and shape.pdl),
    )  # fmt: skip


def _attend_row_tiles(
    shape: AttentionParams,
    config: KernelConfig,
    num_ctas: int,
    t: Operands,
    tiles: torch.Tensor,
    partials: PartialResults,
    num_splits: int,
) -> None:
    split = num_splits > 1
    launch_kernel(
        select_variant(kernels.prefill.attend_prefill, t.q), (num_ctas,), t.q, _source(t.k_source, shape, config),
        _source(t.v_source, shape, config), t.k_scale, t.v_scale, t.sinks, t.out, t.lse,
        *_row_tile_arguments(shape, t, tiles, partials), *t.k_source.stride()[:3], *t.v_source.stride()[:3],
        num_splits, BLOCK_M=config.block_m, BLOCK_M_POW2=next_power_of_two(config.block_m), SPLIT_KV=split,
        **generic_constants(shape, config, t), USE_TMA=config.kernel is Kernel.BOXES,
        **_constants(shape, config, t, split and shape.pdl),
    )  # fmt: skip


def _row_tile_arguments(
    shape: AttentionParams, t: Operands, tiles: torch.Tensor, partials: PartialResults
) -> tuple[Any, ...]:
    """Return the arguments that both kernels of prefill take after lse, up to the page table's stride."""
    return (
        partials.out, partials.lse, partials.work, tiles, t.prefix_lens, t.q_indptr, t.page_table, shape.group,
        shape.num_kv_heads, shape.window_left, shape.scale * LOG2E, shape.cap, t.q.stride(0), t.q.stride(1),
        t.out.stride(0), t.out.stride(1), 0 if t.lse is None else t.lse.stride(0), t.page_table.stride(0),
    )  # fmt: skip


def _constants(shape: AttentionParams, config: KernelConfig, t: Operands, pdl: bool) -> dict[str, Any]:
    """Return the constants and compiler options of every kernel that reads keys by page table."""
    return {
        "PAGE_SIZE": shape.page_size, "BLOCK_N": config.block_n, "WINDOW": shape.window, "CAP": shape.cap > 0,
        "SINKS": t.sinks is not None, "WITH_LSE": t.lse is not None, "OVERHEAD_TILES": OVERHEAD_TILES, "PDL": pdl,
        "STAGES": config.num_stages, **pdl_option(pdl),
    }  # fmt: skip


def generic_constants(shape: AttentionParams, config: KernelConfig, t: Operands | ChosenOperands) -> dict[str, Any]:
    """Return the constants and compiler options of the kernels in `kernels`: columns of a tile, scales and warps."""
    return {
        "HEAD_DIM": shape.head_dim, "BLOCK_D": shape.block_d, "VALUE_DIM": shape.value_width, "BLOCK_V": shape.block_v,
        "LATENT": kernels.latent.FP8_DS_MLA.value if shape.fp8_ds_mla else shape.latent,
        "SCALED": scaled(t.k_scale, t.v_scale), "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def _sm90_constants(shape: AttentionParams, config: KernelConfig, t: Operands, k: torch.Tensor) -> dict[str, Any]:
    """Return the constants and compiler options of the Hopper kernels for K and V.

    Args:
        k: K with adjacent heads merged as the kernel reads it.
    """
    return {
        "HEAD_DIM": shape.head_dim, "SCALED": scaled(t.k_scale, t.v_scale), "STRIDE_ALIGN": _stride_align(t.q, t.out),
        **tma.kernel_options(config, k, t.q, shape.page_size),
    }  # fmt: skip


def has_aligned_rows(q: torch.Tensor) -> bool:
    """Check whether each head of each row of q starts at a multiple of 16 bytes."""
    return all(step % 16 == 0 for step in (q.data_ptr(), *(stride * q.element_size() for stride in q.stride()[:2])))


def _stride_align(q: torch.Tensor, out: torch.Tensor) -> int:
    """Return the number of elements in 16 bytes if it divides q's and out's row and head strides; else 1."""
    elements = 16 // q.element_size()
    return elements if all(stride % elements == 0 for stride in (*q.stride()[:2], *out.stride()[:2])) else 1


def _source(cache: torch.Tensor, shape: AttentionParams, config: KernelConfig) -> torch.Tensor | TensorDescriptor:
    """Return the cache, or for `Kernel.BOXES` a descriptor of ``[slots, heads · dim]`` with one KV tile a box."""
    if config.kernel is not Kernel.BOXES:
        return cache
    pages, page_size, kv_heads_per_tile, dim = cache.shape
    return TensorDescriptor(
        cache, [pages * page_size, kv_heads_per_tile * dim], [cache.stride(1), 1], [config.block_n, dim]
    )
