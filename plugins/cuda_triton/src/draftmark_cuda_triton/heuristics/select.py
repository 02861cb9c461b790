"""Selection of a batch's kernel configuration. Integers only, no torch.

The configuration depends only on values that a CUDA graph fixes: rows of a request, requests, GQA group size, head_dim,
page size, window, dtypes and device. It never depends on sequence lengths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from draftmark import AttentionShape, DeviceProfile, ceil_div

from ..support import TMA_PAGE_MULTIPLE, gathers_kv
from . import latent
from .common import MIN_BLOCK_M, Kernel, KernelConfig, next_power_of_two
from .sm80 import generic_config, uses_tma
from .sm90 import (
    BLOCK_M_3WG,
    ROW_THRESHOLDS,
    SMEM_BYTES,
    base_config,
    box_fits_head,
    fp8_block_ms,
    fp8_config,
    has_sm90_kernels,
    merged_block_ms,
    merged_config,
    merging_heads_pays,
    prefill_configs,
    row_threshold,
    unmerged_config,
    with_gather,
    with_three_wgs,
    with_two_ctas,
)


def select_config(
    shape: AttentionShape, device: DeviceProfile, q_len: Any, prefill: bool = False, num_reqs: Any = 1
) -> KernelConfig:
    """Return the kernel configuration for a batch of num_reqs requests with q_len rows each.

    Hopper kernels are selected if they serve the shape, else the Triton kernels. NOTES.md has the measurements.

    Args:
        q_len: rows of the longest request.
        prefill: the batch is an EXTEND batch.
        num_reqs: requests of the batch, padding included.
    """
    rows = q_len * shape.group_size
    if shape.latent:
        if prefill:
            return latent.latent_config(shape, device, rows)
        return latent.decode_config(shape, device, rows, num_reqs)
    tma_pages = shape.page_size % TMA_PAGE_MULTIPLE == 0
    if not has_sm90_kernels(shape, device) or not (tma_pages or gathers_kv(shape)):
        return generic_config(shape, device, shape.q_dtype == "float32" or rows <= MIN_BLOCK_M)
    if not prefill and merging_heads_pays(shape, device, rows, num_reqs):
        config = merged_config(shape, rows)
        return config if tma_pages else replace(config, kernel=Kernel.SM90_GATHER)
    block_ms = () if prefill else fp8_block_ms(shape)
    if block_ms and rows <= block_ms[-1]:
        return fp8_config(shape, rows)
    config = base_config(shape, row_threshold(rows))
    config = config if tma_pages else replace(config, kernel=Kernel.SM90_GATHER)
    if prefill:
        return prefill_configs(shape, config)[0]
    if not tma_pages:
        return config
    if ceil_div(rows, BLOCK_M_3WG) < ceil_div(rows, 128) < 4:
        return with_three_wgs(shape, config)
    request_heads = num_reqs * shape.num_kv_heads
    return with_gather(shape, device, with_two_ctas(shape, device, config, rows, request_heads), rows, request_heads)


def config_candidates(shape: AttentionShape, device: DeviceProfile) -> tuple[KernelConfig, ...]:
    """Return every configuration that `select_config` can return for this head_dim and these dtypes.

    Sizing takes the maximum over all of them, so it needs no branch on page size or rows. Configurations with gathered
    keys are omitted, because their tiles and splits equal those with TMA.
    """
    # A symbolic page size in a proof has no hash.
    return (_candidates if isinstance(shape.page_size, int) else _candidates.__wrapped__)(shape, device)


@lru_cache(maxsize=256)
def _candidates(shape: AttentionShape, device: DeviceProfile) -> tuple[KernelConfig, ...]:
    if shape.latent:
        hopper = () if latent.reasons_against_sm90(shape, device) else latent.sm90_candidates(shape)
        return (*latent.latent_candidates(shape, device), *hopper)
    tiles = [generic_config(shape, device, True)]
    if shape.q_dtype != "float32":
        tiles.append(generic_config(shape, device, False))
    if has_sm90_kernels(shape, device):
        tiles += [base_config(shape, min_rows) for min_rows in ROW_THRESHOLDS]
        tiles.append(with_three_wgs(shape, tiles[-1]))
        tiles += [fp8_config(shape, block_m) for block_m in fp8_block_ms(shape)]
        tiles += [merged_config(shape, block_m // 2) for block_m in merged_block_ms(shape)]
    return tuple(dict.fromkeys(tiles))


def prefill_candidates(shape: AttentionShape, device: DeviceProfile) -> tuple[KernelConfig, ...]:
    """Return EXTEND configurations for sizing: those of `select_config`, or ones with equally large buffers."""
    tiles = config_candidates(shape, device)
    return (*tiles, *(with_three_wgs(shape, config) for config in tiles if config.num_consumer_wgs == 2))


def fallback_config(shape: AttentionShape, config: KernelConfig) -> KernelConfig:
    """Return a configuration with the tile shape of `config` for the Triton kernels in `kernels`.

    It is used if the Hopper kernels cannot load a cache. Triton pads head_dim to a power of two, so num_stages is at
    most 2, or 1 if two padded stages do not fit into shared memory.
    """
    row = 2 * next_power_of_two(shape.head_dim)
    fits = (config.block_m + 2 * 2 * config.block_n) * row <= SMEM_BYTES
    stages = min(config.num_stages, 2 if fits else 1)
    return replace(
        config,
        kernel=Kernel.POINTERS,
        num_consumer_wgs=0,
        kv_heads_per_tile=1,
        box_full_head=False,
        num_stages=stages,
    )


def adapt_to_cache(
    shape: AttentionShape,
    device: DeviceProfile,
    config: KernelConfig,
    uniform_stride: bool,
    tma_boxes: bool,
    adjacent_heads: bool = True,
    fast_memory: bool = False,
    flat_q: bool = True,
) -> KernelConfig:
    """Return `config` adapted to the strides of a cache: TMA, merged heads or full-head boxes only where possible.

    The function never changes block_n or the number of splits, so a schedule stays valid for every cache.

    Args:
        uniform_stride: tokens have one constant stride across all pages, in K and in V.
        tma_boxes: TMA can describe the strides of K and V, and Gluon is available.
        adjacent_heads: the heads of a token are adjacent in memory.
        fast_memory: memory bandwidth is at least `tma.FAST_MEMORY_BANDWIDTH`. Above 64 packed rows MMA is then the
            limit, not memory, and TMA is faster than gathering.
        flat_q: TMA can load packed rows of q (`tma.has_flat_rows`); only for latent rows.
    """
    if config.kernel.is_latent:
        if config.kernel is Kernel.SM90_LATENT_RS and not flat_q and shape.kv_dtype == shape.q_dtype:
            config = latent.sm90_config(shape, block_n=config.block_n)
        serves = tma_boxes and (flat_q or config.kernel is Kernel.SM90_LATENT)
        return config if serves else latent.portable_config(shape, device, config)
    if config.kernel.is_sm90:
        if tma_boxes:
            config = config if adjacent_heads else unmerged_config(shape, config)
            back_to_tma = fast_memory and config.num_consumer_wgs > 1 and shape.page_size % TMA_PAGE_MULTIPLE == 0
            if config.kernel is Kernel.SM90_GATHER and back_to_tma:
                config = replace(config, kernel=Kernel.SM90)
            return replace(config, box_full_head=adjacent_heads and box_fits_head(shape, config))
        config = fallback_config(shape, config)
    in_boxes = uniform_stride and uses_tma(shape, device, config)
    return replace(config, kernel=Kernel.BOXES if in_boxes else Kernel.POINTERS)
