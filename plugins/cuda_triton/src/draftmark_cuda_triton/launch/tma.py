"""TMA descriptors of a paged KV cache, and the launch options of the Hopper kernels."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from ..heuristics.common import KernelConfig, next_power_of_two
from ..heuristics.sm90 import overlaps_softmax, split_head_dim

SWIZZLE_BYTES = 128
"""Bytes of a row of a box: what the copy engine swizzles, and wgmma reads."""
SWIZZLE_ROWS = 8
"""Rows that are swizzled together: keys of the smallest box of whole heads."""
MAX_FP8_BOX_KEYS = 32
"""Rows of a box of keys that are widened in registers, at most."""
FAST_MEMORY_BANDWIDTH = 4 * 10**12
"""Bytes a second of an H200's memory (4.9e12), and more than an H100's has (3.4e12)."""
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 160}
"""Registers of a thread of a folding warp group, by how many there are beside the fetching warps."""
CONSUMER_REGISTERS_UPCAST = 168
"""The same beside a group that widens too."""
CONSUMER_REGISTERS_GATHER = 224
"""Registers of a thread of a folding warp group, of two beside four gathering warps; those have 56."""


def box_keys(page_size: int, config: KernelConfig) -> int:
    """Rows of a box: a page, or the largest part of one that tiles of keys are whole multiples of.

    Where e4m3 is widened in registers 32 at most: of a box of 64 what rows see takes registers that its loop has not.
    """
    return math.gcd(page_size, min(MAX_FP8_BOX_KEYS, config.block_n) if config.fp8_swap_ab else config.block_n)


def tile_columns(config: KernelConfig, head_dim: int, size: int) -> tuple[int, int]:
    """Columns of the parts of a tile; see `sm90.split_head_dim`. Where e4m3 is widened in registers it has one."""
    return (next_power_of_two(head_dim), 0) if config.fp8_swap_ab else split_head_dim(head_dim, size)


@cache
def has_fast_memory(device: torch.device) -> bool:
    """Whether a device's memory has FAST_MEMORY_BANDWIDTH, as far as this torch tells."""
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * 1000 * kilohertz * bits // 8 >= FAST_MEMORY_BANDWIDTH


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_resident_ctas(tensor: torch.Tensor, config: KernelConfig) -> int:
    """Programs that the device holds at a time."""
    return _num_sms(tensor.device) * config.ctas_per_sm


def is_tma_describable(tensor: torch.Tensor) -> bool:
    """Whether a box can describe a cache ``[pages, P, heads, dim]``: any strides, if multiples of 16 bytes."""
    steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:3])]
    return tensor.stride(3) == 1 and all(step % 16 == 0 for step in steps) and all(tensor.stride())


def merge_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A cache as if as many heads, which lie beside each other, were one: ``[pages, P, heads / n, n · dim]``."""
    pages, tokens, _, dim = tensor.shape
    return tensor if heads == 1 else tensor.view(pages, tokens, -1, heads * dim)


def make_descriptors(tensor: torch.Tensor, page_size: int, config: KernelConfig) -> tuple[Any, Any]:
    """A descriptor of a cache, in boxes; and another: where heads come whole, in boxes of SWIZZLE_ROWS keys; where a
    tile has columns of a second part, in boxes of those; or None.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (pages, tokens, heads, dim), size, keys = tensor.shape, tensor.element_size(), box_keys(page_size, config)
    if not config.box_full_head:
        widths = [min(SWIZZLE_BYTES, columns * size) for columns in tile_columns(config, dim, size) if columns]
        shape, strides = list(tensor.shape), list(tensor.stride())
        found = [
            TensorDescriptor(tensor, shape, strides, [1, keys, 1, width // size], _layout(width, size, 4))
            for width in widths
        ]
        return found[0], found[1] if len(found) > 1 else None
    width = SWIZZLE_BYTES
    parts, rows, row = dim * size // width, SWIZZLE_ROWS, tensor.stride(1)
    shape = [pages, tokens // rows, heads * parts, rows, width // size]
    strides = [tensor.stride(0), rows * row, width // size, row, 1]
    of_page, of_rows = (
        TensorDescriptor(tensor, shape, strides, [1, count, parts, rows, width // size], _layout(width, size, 5))
        for count in (keys // rows, 1)
    )
    return of_page, of_rows


@cache
def _layout(width: int, size: int, rank: int) -> Any:
    """Of a box in shared memory, with rows of `width` bytes of elements of `size`."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(width, 8 * size, rank=rank)


@cache
def has_gluon() -> bool:
    """Whether this Triton has Gluon as `kernels_sm90` uses it; it is experimental there."""
    try:
        from .. import kernels_sm90  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def kv_arguments(
    k: torch.Tensor, v: torch.Tensor, page_size: int, config: KernelConfig
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """K and V as the tile's kernel takes them, and the numbers that say where their pages are.

    Args:
        k, v: ``[pages, P, KV heads, head_dim]``, which `is_tma_describable` has found good for either way.
    """
    if config.gather_kv:
        return (k, v), (*byte_strides(k), *byte_strides(v))
    (k_box, k_extra), (v_box, v_extra) = (make_descriptors(one, page_size, config) for one in (k, v))
    return (k_box, v_box, k_extra, v_extra), (k.shape[0],)


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of pages, slots and heads in bytes."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride()[:3])


def _common_options(config: KernelConfig, k: torch.Tensor, q: torch.Tensor) -> dict[str, Any]:
    """Constants and compiler options of a program: its columns, who widens, and how many registers its threads have."""
    # Programs that share a multiprocessor leave each of their 256 threads so many registers when they start.
    register_limit = {"maxnreg": 65536 // (256 * config.ctas_per_sm) // 8 * 8} if config.ctas_per_sm > 1 else {}
    block_d, block_d_rest = tile_columns(config, k.shape[3], k.element_size())
    if config.fp8_swap_ab:
        return {"BLOCK_M": config.block_m, "BLOCK_D": block_d, "num_warps": 4} | register_limit
    upcast = k.dtype != q.dtype
    chosen: dict[str, Any] = {
        "BLOCK_D": block_d, "BLOCK_D_REST": block_d_rest, "NUM_CONSUMER_WGS": config.num_consumer_wgs,
        "UPCAST_FP8": upcast, "FP8_STAGES": config.num_fp8_stages if upcast else config.num_stages,
        "INTRA_WG_OVERLAP": overlaps_softmax(config, k.shape[3]), "num_warps": 4,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS_UPCAST if upcast else CONSUMER_REGISTERS[config.num_consumer_wgs],
    }  # fmt: skip
    return chosen | register_limit


def kernel_options(config: KernelConfig, k: torch.Tensor, q: torch.Tensor, page_size: int) -> dict[str, Any]:
    """Constants and compiler options of the tile's kernel; see `_common_options`."""
    chosen = _common_options(config, k, q)
    if not config.gather_kv:
        return chosen | {"BOX_KEYS": SWIZZLE_ROWS if config.box_full_head else box_keys(page_size, config)}
    del chosen["UPCAST_FP8"], chosen["FP8_STAGES"]
    return chosen | {"CONSUMER_REGISTERS": CONSUMER_REGISTERS_GATHER}
