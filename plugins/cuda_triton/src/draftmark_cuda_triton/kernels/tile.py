"""Loads of query and key tiles, and the matrix product, for all attention kernels in this folder."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .inline import INTERPRETED, inline


@dataclass(frozen=True)
class Tiles:
    """Compile-time constants of the tiles of an attention kernel; its functions receive them as C.

    Attributes:
        PAGE_SIZE: tokens of a page.
        BLOCK_N: keys of a key tile.
        HEAD_DIM, VALUE_DIM: elements of a key and of a value. A latent row's value is its first VALUE_DIM elements.
        BLOCK_D, BLOCK_V: columns of a K tile and of a V tile; of latent rows those of the rest and of the value part.
        TAIL_KIND: see `mask`.
        WINDOW, CAP: the layer has a sliding window; its logits have a soft cap.
        USE_TMA: a key tile is loaded as one TMA box.
        STAGES: key tiles in flight.
    """

    PAGE_SIZE: int
    BLOCK_N: int
    HEAD_DIM: int
    BLOCK_D: int
    VALUE_DIM: int
    BLOCK_V: int
    TAIL_KIND: int
    WINDOW: bool
    CAP: bool
    USE_TMA: bool
    STAGES: int


@triton.constexpr_function
def make_tiles(**values):
    """Create `Tiles` inside a kernel."""
    return Tiles(**values)


class KvSource(NamedTuple):
    """K or V of a paged cache.

    Attributes:
        data: pointer to ``[pages, P, heads, dim]``, or a TMA descriptor of ``[slots, heads · dim]``.
        stride_page, stride_slot, stride_head: strides in elements.
    """

    data: tl.tensor
    stride_page: tl.tensor
    stride_slot: tl.tensor
    stride_head: tl.tensor


@inline
def dot(a, b, acc):
    """Return ``a · b + acc`` in fp32; b is converted to a's dtype."""
    b = b.to(a.dtype)
    if INTERPRETED:
        # The interpreter keeps bf16 as uint16 and would multiply the bit patterns.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@inline
def is_loaded(position, first_key, kv_len, C: tl.constexpr):
    """Return True for the keys that pointer loads read: before kv_len, and with a window from `first_key` on.

    Pages left of the window may belong to another request and contain NaN. If a tile lies in one page, that page also
    holds a visible key, so the request still owns it.
    """
    if C.WINDOW and C.PAGE_SIZE % C.BLOCK_N != 0:
        return (position >= first_key) & (position < kv_len)
    else:
        return position < kv_len


@inline
def load_page_ids(page_row, tile, first_key, kv_len, C: tl.constexpr):
    """Load the page ids of a tile's keys: one id if the tile lies in one page, ``[BLOCK_N]`` otherwise."""
    if C.PAGE_SIZE % C.BLOCK_N == 0:
        return tl.load(page_row + tile * C.BLOCK_N // C.PAGE_SIZE)
    else:
        position = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        loaded = is_loaded(position, first_key, kv_len, C)
        return tl.load(page_row + position // C.PAGE_SIZE, mask=loaded, other=0)


@inline
def load_tile(
    source,
    page,
    tile,
    head,
    first_key,
    kv_len,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    C: tl.constexpr,
):
    """Load a K or V tile ``[BLOCK_N, BLOCK_D]``.

    Keys that `is_loaded` excludes are zeros. With USE_TMA they are the contents of the page.
    """
    if C.USE_TMA:
        # The descriptor views the cache as [slots, heads · dim]. A tile lies in one page, so one TMA box is one tile.
        return source.data.load([page * C.PAGE_SIZE + tile * C.BLOCK_N % C.PAGE_SIZE, head * DIM])
    else:
        col = tl.arange(0, BLOCK_D)
        position = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        # 64-bit: page · stride exceeds 2**31 in a large pool (vllm#47671).
        rows = page.to(tl.int64) * source.stride_page + (position % C.PAGE_SIZE) * source.stride_slot
        pointers = source.data + rows[:, None] + head * source.stride_head + col[None, :]
        live = is_loaded(position, first_key, kv_len, C)[:, None]
        if DIM != BLOCK_D:
            live = live & (col < DIM)[None, :]
        return tl.load(pointers, mask=live, other=0.0)


@inline
def load_queries(rows, live, first, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load elements [first, first + DIM) of each packed row as ``[BLOCK_M, BLOCK_D]``; zeros where not `live`.

    Args:
        rows: pointers ``[BLOCK_M, 1]`` to the packed rows.
    """
    col = tl.arange(0, BLOCK_D)
    return tl.load(rows + first + col[None, :], mask=live[:, None] & (col < DIM)[None, :], other=0.0)


@inline
def load_scales(k_scale, v_scale, SCALED: tl.constexpr):
    """Return the scales of K and V; 1 for a scale that SCALED does not have (bit 0: K, bit 1: V)."""
    k_factor, v_factor = 1.0, 1.0
    if SCALED & 1:
        k_factor = tl.load(k_scale)
    if SCALED & 2:
        v_factor = tl.load(v_scale)
    return k_factor, v_factor
