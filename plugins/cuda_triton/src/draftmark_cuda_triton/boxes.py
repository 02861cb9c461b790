"""The KV cache as Hopper's copy engine sees it: boxes of a page, or of a part of one, and of a head or 128 bytes."""

from __future__ import annotations

import importlib
import math
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

import torch

from .tiling import Tile, columns, next_power_of_two, overlaps

SWIZZLE = 128
"""Bytes of a row of a box: what the copy engine swizzles, and wgmma reads."""
SWIZZLED_ROWS = 8
"""Rows that are swizzled together: keys of the smallest box of whole heads."""
NARROW_BOX = 32
"""Rows of a box of keys that are widened in registers, at most."""
FAST_MEMORY = 4 * 10**12
"""Bytes a second of an H200's memory (4.9e12), and more than an H100's has (3.4e12)."""
FOLD_REGISTERS = {1: 232, 2: 232, 3: 160}
"""Registers of a thread of a folding warp group, by how many there are beside the fetching warps."""
CROWDED_REGISTERS = 168
"""The same beside a group that widens too."""


def box(page_size: int, tile: Tile) -> int:
    """Rows of a box: a page, or the largest part of one that tiles of keys are whole multiples of.

    Where e4m3 is widened in registers 32 at most: of a box of 64 what rows see takes registers that its loop has not.
    """
    return math.gcd(page_size, min(NARROW_BOX, tile.block_n) if tile.narrow else tile.block_n)


def columns_of(tile: Tile, head_dim: int, size: int) -> tuple[int, int]:
    """Columns of the parts of a tile; see `tiling.columns`. Where e4m3 is widened in registers it has one."""
    return (next_power_of_two(head_dim), 0) if tile.narrow else columns(head_dim, size)


def options(tile: Tile, k: torch.Tensor, q: torch.Tensor) -> dict[str, Any]:
    """Constants and compiler options of a program: its columns, who widens, and how many registers its threads have."""
    # Programs that share a multiprocessor leave each of their 256 threads so many registers when they start.
    crowd = {"maxnreg": 65536 // (256 * tile.programs_per_sm) // 8 * 8} if tile.programs_per_sm > 1 else {}
    block_d, rest = columns_of(tile, k.shape[3], k.element_size())
    if tile.narrow:
        return {"BLOCK_M": tile.block_m, "BLOCK_D": block_d, "num_warps": 4} | crowd
    widen = k.dtype != q.dtype
    chosen: dict[str, Any] = {
        "BLOCK_D": block_d, "REST": rest, "MEMBERS": tile.members, "WIDEN": widen,
        "DEPTH": tile.depth if widen else tile.num_stages, "OVERLAP": overlaps(tile, k.shape[3]), "num_warps": 4,
        "REGISTERS": CROWDED_REGISTERS if widen else FOLD_REGISTERS[tile.members],
    }  # fmt: skip
    return chosen | crowd


@cache
def has_fast_memory(device: torch.device) -> bool:
    """Whether a device's memory has FAST_MEMORY, as far as this torch tells."""
    told = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(told, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * 1000 * kilohertz * bits // 8 >= FAST_MEMORY


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def places(tensor: torch.Tensor, tile: Tile) -> int:
    """Programs that the device holds at a time."""
    return _multiprocessors(tensor.device) * tile.programs_per_sm


def describable(tensor: torch.Tensor) -> bool:
    """Whether a box can describe a cache ``[pages, P, heads, dim]``: any strides, if multiples of 16 bytes."""
    steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:3])]
    return tensor.stride(3) == 1 and all(step % 16 == 0 for step in steps) and all(tensor.stride())


def beside(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A cache as if as many heads, which lie beside each other, were one: ``[pages, P, heads / n, n · dim]``."""
    pages, tokens, _, dim = tensor.shape
    return tensor if heads == 1 else tensor.view(pages, tokens, -1, heads * dim)


def describe(tensor: torch.Tensor, page_size: int, tile: Tile) -> tuple[Any, Any]:
    """A descriptor of a cache, in boxes; and another: where heads come whole, in boxes of SWIZZLED_ROWS keys; where a
    tile has columns of a second part, in boxes of those; or None.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (pages, tokens, heads, dim), size, keys = tensor.shape, tensor.element_size(), box(page_size, tile)
    if not tile.whole:
        widths = [min(SWIZZLE, columns * size) for columns in columns_of(tile, dim, size) if columns]
        shape, strides = list(tensor.shape), list(tensor.stride())
        found = [
            TensorDescriptor(tensor, shape, strides, [1, keys, 1, width // size], _layout(width, size, 4))
            for width in widths
        ]
        return found[0], found[1] if len(found) > 1 else None
    width = SWIZZLE
    parts, rows, row = dim * size // width, SWIZZLED_ROWS, tensor.stride(1)
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
def available() -> bool:
    """Whether this Triton has Gluon as `hopper` uses it; it is experimental there."""
    try:
        hopper()
    except (ImportError, AttributeError):
        return False
    return True


@cache
def hopper() -> ModuleType:
    """The package of Hopper kernels; each of its modules is an attribute."""
    package = importlib.import_module(f"{__package__}.hopper")
    for one in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{one.name}")
    return package
