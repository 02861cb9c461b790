"""Heuristics of prefill over an e4m3 cache: when K and V are upcast first, and how many pages that needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile, ceil_div, maximum, minimum

from .common import visible_prefix
from .interpreted import INTERPRETED_KEYS
from .sm90 import has_sm90_kernels, rounds

UPCAST_PAGE_SIZE = 128
"""Keys of a page of upcast K and V: one KV tile, loaded as one TMA box."""
UPCAST_BYTES = 128 << 20
"""Maximum bytes of upcast K and V together. KV heads are upcast in groups that fit."""
UPCAST_TABLE_CELLS = 1 << 16
"""Maximum cells of the upcast page table: requests times pages of the longest request."""
UPCAST_MIN_ROWS = 400
"""Average packed rows that see a key, from which upcasting the key once is faster than in each row tile.

For each K element and the matching V element, upcasting reads 2 bytes and writes 4, in 1.5 ps at 4 TB/s. With 16-bit K
and V each packed row then saves 4 fs.
"""
UPCAST_LAUNCH_COST = 1 << 30
"""Cost of the upcast launch (4 µs), as packed rows x keys x K elements of a key, beyond UPCAST_MIN_ROWS rows a key."""


def upcasts(shape: AttentionShape, device: DeviceProfile) -> bool:
    """Check whether EXTEND can upcast K and V before attention: an e4m3 cache on a device with Hopper kernels.

    It does not if the layer allows to multiply e4m3 by e4m3.
    """
    return has_sm90_kernels(shape, device) and shape.kv_dtype != shape.q_dtype and not rounds(shape)


def upcast_shape(shape: AttentionShape, head_groups: int = 1) -> AttentionShape:
    """Return the attention shape over upcast K and V, for one of `head_groups` equal groups of KV heads."""
    queries, heads = shape.num_qo_heads // head_groups, shape.num_kv_heads // head_groups
    return replace(shape, num_qo_heads=queries, num_kv_heads=heads, kv_dtype=shape.q_dtype, page_size=UPCAST_PAGE_SIZE)


def head_group_counts(shape: AttentionShape) -> list[int]:
    """Return every number of equal groups into which the KV heads can be divided, ascending."""
    return [head_groups for head_groups in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % head_groups == 0]


def upcast_pages(shape: AttentionShape, num_reqs: Any, max_kv_len: Any) -> Any:
    """Return the number of pages to allocate for upcast K and V of all requests and KV heads, within UPCAST_BYTES."""
    page = 2 * UPCAST_PAGE_SIZE * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[shape.q_dtype]
    return minimum(num_reqs * ceil_div(max_kv_len, UPCAST_PAGE_SIZE), maximum(1, UPCAST_BYTES // page))


def upcast_table_cells(num_reqs: Any, max_kv_len: Any) -> Any:
    """Return the number of entries to allocate for the page table of upcast K and V."""
    return minimum(num_reqs * ceil_div(max_kv_len, UPCAST_PAGE_SIZE), UPCAST_TABLE_CELLS)


def request_upcast_pages(shape: AttentionShape, rows: int, prefix: int) -> int:
    """Return an upper bound of the upcast pages of a request with `rows` rows after at most `prefix` tokens.

    With a window only visible keys are upcast, from a multiple of INTERPRETED_KEYS on (ALIGN_KEYS of `upcast_kv`).
    """
    pages = ceil_div(prefix + rows, UPCAST_PAGE_SIZE)
    if shape.window_left >= 0:
        pages = min(
            pages, ceil_div(shape.window_left + rows, UPCAST_PAGE_SIZE) + ceil_div(INTERPRETED_KEYS, UPCAST_PAGE_SIZE)
        )
    return pages if rows else 0


def num_head_groups(shape: AttentionShape, pages: int, room: int) -> int:
    """Return the smallest number of equal groups of KV heads so that one group fits into the upcast buffers.

    The result is 0 if a single head does not fit.

    Args:
        pages: upcast pages that the batch needs.
        room: allocated pages, each with all KV heads.
    """
    return next((head_groups for head_groups in head_group_counts(shape) if pages <= room * head_groups), 0)


def upcast_pays(shape: AttentionShape, q_lens: tuple[int, ...], lens: tuple[int, ...]) -> bool:
    """Check whether upcasting K and V once is estimated to be faster than upcasting them in each row tile.

    Args:
        q_lens: rows of each live request.
        lens: upper bounds of their prefix lengths, in tokens.
    """
    seen, keys, window = 0, 0, shape.window_left
    for rows, n in zip(q_lens, lens, strict=True):
        before = visible_prefix(shape, n)
        seen += rows * shape.group_size * (n + rows // 2 if window < 0 else min(n + rows // 2, window + 1))
        keys += rows + before if rows else 0
    return shape.num_kv_heads * shape.head_dim * (seen - UPCAST_MIN_ROWS * keys) >= UPCAST_LAUNCH_COST
