"""When prefill over an e4m3 cache upcasts K and V first, and how many pages that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile, ceil_div, maximum, minimum

from .common import visible_prefix
from .interpreted import INTERPRETED_KEYS
from .sm90 import has_sm90_kernels

UPCAST_PAGE_SIZE = 128
"""Keys of a page of K and V that EXTEND has widened: a tile of keys, in one box."""
UPCAST_BYTES = 128 << 20
"""What widened K and V take at most, of as many heads at a time as that has room for."""
UPCAST_TABLE_CELLS = 1 << 16
"""Cells of the page table of what is widened: requests times the pages of the longest."""
UPCAST_MIN_ROWS = 400
"""Packed rows that see a key, on average, from which on widening it once costs less than widening it in each row tile:
6 bytes of an element move at 4 TB/s, 1.5 ps, and a row's products of it take 4 fs less of K and V that are wide.
"""
UPCAST_LAUNCH_COST = 1 << 30
"""Rows times keys times elements of K of a token beyond those, that pay for one more launch: 4 us."""


def upcasts(shape: AttentionShape, device: DeviceProfile) -> bool:
    """Whether EXTEND may widen K and V before it attends: e4m3, where `kernels_sm90` has kernels for the rows."""
    return has_sm90_kernels(shape, device) and shape.kv_dtype != shape.q_dtype


def upcast_shape(shape: AttentionShape, head_groups: int = 1) -> AttentionShape:
    """The attention of rows over K and V that have been widened, of one of so many parts of the heads."""
    queries, heads = shape.num_qo_heads // head_groups, shape.num_kv_heads // head_groups
    return replace(shape, num_qo_heads=queries, num_kv_heads=heads, kv_dtype=shape.q_dtype, page_size=UPCAST_PAGE_SIZE)


def head_group_counts(shape: AttentionShape) -> list[int]:
    """Into how many parts of as many KV heads a cache can be widened, one after the other."""
    return [head_groups for head_groups in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % head_groups == 0]


def upcast_pages(shape: AttentionShape, num_reqs: Any, max_kv_len: Any) -> Any:
    """Pages of all heads that there is room to widen: of all requests, or as many as UPCAST_BYTES hold."""
    page = 2 * UPCAST_PAGE_SIZE * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[shape.q_dtype]
    return minimum(num_reqs * ceil_div(max_kv_len, UPCAST_PAGE_SIZE), maximum(1, UPCAST_BYTES // page))


def upcast_table_cells(num_reqs: Any, max_kv_len: Any) -> Any:
    """Cells of the page table of what is widened, at most."""
    return minimum(num_reqs * ceil_div(max_kv_len, UPCAST_PAGE_SIZE), UPCAST_TABLE_CELLS)


def request_upcast_pages(shape: AttentionShape, rows: int, prefix: int) -> int:
    """Pages that a request of so many rows takes, whose prefix is so long at most.

    Under a window they begin with a page, or with as many keys as `upcast_kv` rounds down to.
    """
    pages = ceil_div(prefix + rows, UPCAST_PAGE_SIZE)
    if shape.window_left >= 0:
        pages = min(
            pages, ceil_div(shape.window_left + rows, UPCAST_PAGE_SIZE) + ceil_div(INTERPRETED_KEYS, UPCAST_PAGE_SIZE)
        )
    return pages if rows else 0


def num_head_groups(shape: AttentionShape, pages: int, room: int) -> int:
    """Into how many parts of as many KV heads so many pages are widened, one after the other; 0 where one head alone
    has no room.
    """
    return next((head_groups for head_groups in head_group_counts(shape) if pages <= room * head_groups), 0)


def upcast_pays(shape: AttentionShape, q_lens: tuple[int, ...], lens: tuple[int, ...]) -> bool:
    """Whether K and V that are widened once take less time than those that each row tile widens for itself.

    Args:
        q_lens: rows of each live request. lens: tokens before them, at most.
    """
    seen, keys, window = 0, 0, shape.window_left
    for rows, n in zip(q_lens, lens, strict=True):
        before = visible_prefix(shape, n)
        seen += rows * shape.group_size * (n + rows // 2 if window < 0 else min(n + rows // 2, window + 1))
        keys += rows + before if rows else 0
    return shape.num_kv_heads * shape.head_dim * (seen - UPCAST_MIN_ROWS * keys) >= UPCAST_LAUNCH_COST
