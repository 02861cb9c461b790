"""TMA descriptors of a paged KV cache, and the launch options of the Hopper kernels."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from ..heuristics.common import Kernel, KernelConfig, next_power_of_two
from ..heuristics.sm90 import overlaps_softmax, split_head_dim

SWIZZLE_BYTES = 128
"""Bytes of a TMA box row: the swizzle width that wgmma reads."""
SWIZZLE_ROWS = 8
"""Rows of a swizzle atom, and keys of the smallest box that holds whole heads."""
MAX_FP8_BOX_KEYS = 32
"""Maximum keys of a TMA box if e4m3 is upcast in registers."""
FAST_MEMORY_BANDWIDTH = 4 * 10**12
"""Memory bandwidth in bytes a second, between that of an H100 (3.4e12) and of an H200 (4.9e12)."""
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 160}
"""Registers of a consumer thread with TMA producer warps, by the number of consumer warp groups."""
CONSUMER_REGISTERS_UPCAST, CONSUMER_REGISTERS_UPCAST_128 = 168, 200
"""Registers of a consumer thread next to a producer warp group that upcasts e4m3; the second value for two consumer
warp groups with tiles of 128 keys."""
CONSUMER_REGISTERS_ROUNDED = 216
"""Registers of a consumer thread next to a producer warp group that transposes V. A producer thread has 56."""
CONSUMER_REGISTERS_GATHER = 224
"""Registers of a consumer thread with two consumer warp groups and four gathering warps. A gathering thread has 56."""


def box_keys(page_size: int, config: KernelConfig) -> int:
    """Return the number of keys of a TMA box: the largest divisor of the page size that also divides a KV tile.

    If e4m3 is upcast in registers, a box has at most 32 keys, because masks of 64 keys would need too many registers.
    """
    most = MAX_FP8_BOX_KEYS if config.kernel is Kernel.SM90_FP8 else config.block_n
    return math.gcd(page_size, min(most, config.block_n))


def tile_columns(config: KernelConfig, head_dim: int, size: int) -> tuple[int, int]:
    """Return the columns of a tile's two parts (`sm90.split_head_dim`); one part if e4m3 is upcast in registers."""
    return (next_power_of_two(head_dim), 0) if config.kernel is Kernel.SM90_FP8 else split_head_dim(head_dim, size)


@cache
def has_fast_memory(device: torch.device) -> bool:
    """Check whether the device reaches FAST_MEMORY_BANDWIDTH; False if this torch does not report clock and width."""
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * 1000 * kilohertz * bits // 8 >= FAST_MEMORY_BANDWIDTH


@cache
def _num_sms(device: torch.device) -> int:
    if device.type == "meta":  # a stand-in of `kernel_list`: no grid is needed
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_resident_ctas(tensor: torch.Tensor, config: KernelConfig) -> int:
    """Return the number of CTAs that are resident on the tensor's device at once."""
    return _num_sms(tensor.device) * config.ctas_per_sm


def is_tma_describable(tensor: torch.Tensor) -> bool:
    """Check whether TMA can describe ``[pages, P, heads, dim]``: address and strides are multiples of 16 bytes."""
    steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:3])]
    return tensor.stride(3) == 1 and all(step % 16 == 0 for step in steps) and all(tensor.stride())


def merge_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View `heads` adjacent KV heads of a cache as one: ``[pages, P, heads / n, n · dim]``."""
    pages, tokens, _, dim = tensor.shape
    return tensor if heads == 1 else tensor.view(pages, tokens, -1, heads * dim)


def make_descriptors(tensor: torch.Tensor, page_size: int, config: KernelConfig) -> tuple[Any, Any]:
    """Return two TMA descriptors of one cache: the main one, and a second one or None.

    With `box_full_head` the second descriptor has smaller boxes, of SWIZZLE_ROWS keys. Otherwise, if a tile has a
    second column part, the second descriptor loads it.
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


def latent_descriptor(part: torch.Tensor, keys: int, columns: int, most: int = SWIZZLE_BYTES // 2) -> Any:
    """Return a TMA descriptor of one part of latent rows ``[pages, P, 1, elements]``, in boxes of `keys` tokens.

    A box holds at most `most` elements of a row. 64 elements have 128 bytes in 16 bits, and 64 bytes in e4m3.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = part.element_size()
    width = min(most, columns)
    return TensorDescriptor(
        part, list(part.shape), list(part.stride()), [1, keys, 1, width], _layout(width * size, size, 4)
    )


def query_descriptor(q: torch.Tensor, columns: int, block_m: int) -> Any:
    """Return a TMA descriptor of packed rows of q ``[rows · heads, elements]``, in boxes of `block_m` rows.

    Args:
        q: ``[rows, heads, elements]`` with one pitch between heads (`has_flat_rows`).
        columns: elements of the part of the rows that is loaded; a box holds at most 128 bytes of a row.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    rows, heads, elements = q.shape
    pitch, size = q.stride(0) if heads == 1 else q.stride(1), q.element_size()
    flat, width = q.as_strided((rows * heads, elements), (pitch, 1)), min(SWIZZLE_BYTES // size, columns)
    return TensorDescriptor(
        flat.as_subclass(type(q)),
        list(flat.shape),
        list(flat.stride()),
        [block_m, width],
        _layout(width * size, size, 2),
    )


def has_flat_rows(q: torch.Tensor) -> bool:
    """Check whether TMA can load packed rows: the heads of all rows of q have one pitch, a multiple of 16 bytes."""
    rows, heads, _ = q.shape
    pitch = q.stride(0) if heads == 1 else q.stride(1)
    is_flat = q.stride(2) == 1 and (rows == 1 or q.stride(0) == heads * pitch)
    return is_flat and pitch * q.element_size() % 16 == 0 and q.data_ptr() % 16 == 0


@cache
def _layout(width: int, size: int, rank: int) -> Any:
    """Return the shared-memory layout of a box with rows of `width` bytes and elements of `size` bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(width, 8 * size, rank=rank)


@cache
def has_gluon() -> bool:
    """Check whether this Triton has the parts of Gluon that `kernels_sm90` needs; Gluon is experimental and changes."""
    try:
        from .. import kernels_sm90  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def kv_arguments(
    k: torch.Tensor, v: torch.Tensor, page_size: int, config: KernelConfig
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return K and V as the kernel's arguments, and the integers that locate their pages.

    With gathered keys these are the tensors and their byte strides, otherwise TMA descriptors and the number of pages.

    Args:
        k, v: ``[pages, P, KV heads, head_dim]``, for which `is_tma_describable` holds.
    """
    if config.kernel is Kernel.SM90_GATHER:
        return (k, v), (*byte_strides(k), *byte_strides(v))
    (k_box, k_extra), (v_box, v_extra) = (make_descriptors(one, page_size, config) for one in (k, v))
    return (k_box, v_box, k_extra, v_extra), (k.shape[0],)


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of pages, slots and heads in bytes."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride()[:3])


def _common_options(config: KernelConfig, k: torch.Tensor, q: torch.Tensor) -> dict[str, Any]:
    """Return constants and compiler options that every Hopper kernel needs: tile columns, overlap and registers."""
    # CTAs that share an SM start with 256 threads each, so this limit divides the SM's 65,536 registers evenly among
    # them.
    register_limit = {"maxnreg": 65536 // (256 * config.ctas_per_sm) // 8 * 8} if config.ctas_per_sm > 1 else {}
    block_d, block_d_rest = tile_columns(config, k.shape[3], k.element_size())
    if config.kernel is Kernel.SM90_FP8:
        return {"BLOCK_M": config.block_m, "BLOCK_D": block_d, "num_warps": 4} | register_limit
    upcast = k.dtype != q.dtype
    chosen: dict[str, Any] = {
        "BLOCK_D": block_d, "BLOCK_D_REST": block_d_rest, "NUM_CONSUMER_WGS": config.num_consumer_wgs,
        "UPCAST_FP8": upcast, "FP8_STAGES": config.num_fp8_stages if upcast else config.num_stages,
        "INTRA_WG_OVERLAP": overlaps_softmax(config, k.shape[3]), "num_warps": 4,
        "ROUNDS": config.kernel is Kernel.SM90_ROUNDED,
        "CONSUMER_REGISTERS": _upcast_registers(config) if upcast else CONSUMER_REGISTERS[config.num_consumer_wgs],
    }  # fmt: skip
    return chosen | register_limit


def _upcast_registers(config: KernelConfig) -> int:
    """Return the registers of a consumer thread next to a producer warp group that upcasts or transposes e4m3."""
    if config.kernel is Kernel.SM90_ROUNDED:
        return CONSUMER_REGISTERS_ROUNDED
    two_wgs = config.num_consumer_wgs == 2
    return CONSUMER_REGISTERS_UPCAST_128 if two_wgs and config.block_n == 128 else CONSUMER_REGISTERS_UPCAST


def kernel_options(config: KernelConfig, k: torch.Tensor, q: torch.Tensor, page_size: int) -> dict[str, Any]:
    """Return constants and compiler options of the configuration's kernel."""
    chosen = _common_options(config, k, q)
    if config.kernel is not Kernel.SM90_GATHER:
        return chosen | {"BOX_KEYS": SWIZZLE_ROWS if config.box_full_head else box_keys(page_size, config)}
    del chosen["UPCAST_FP8"], chosen["FP8_STAGES"], chosen["ROUNDS"]
    return chosen | {"CONSUMER_REGISTERS": CONSUMER_REGISTERS_GATHER}
