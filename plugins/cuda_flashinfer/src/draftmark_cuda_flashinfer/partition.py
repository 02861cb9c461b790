"""Partition of a batch into CTAs by FlashInfer's FA2 plan, and the bytes of the plan. Integers only, no torch.

The formulas follow `PrefillPlan` of `attention/scheduler.cuh`, FlashInfer 0.7. Each CTA processes one tile of packed
rows (query rows x heads of a group) against one chunk of keys.

* With few tiles, at most three quarters of two CTAs per SM, the plan splits the keys. It pads the grid to a fixed
  number of CTAs, so that the grid can be captured, and it merges partial results.
* With more tiles the plan never splits. The grid is the number of tiles and depends on no length. Nothing is merged and
  no float workspace is read. FlashInfer's own wrappers reserve a workspace here too, which grows to gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftmark import AttentionShape, DeviceProfile, Geometry, ceil_div, maximum, minimum

from .version import since

ALIGNMENT = 16
LIBRARY_SPLITS = -1
"""Value of `fixed_split_size` for which FlashInfer chooses the chunk itself."""


@dataclass(frozen=True)
class Partition:
    """Describes one FlashInfer plan: how it divides a batch among CTAs, and its bytes.

    Attributes:
        graph: true if the grid is padded to `ctas` for every length; otherwise the grid depends on the batch.
        chunk_pages: keys per CTA in pages, or `LIBRARY_SPLITS`.
        ctas: CTAs per KV head.
        float_bytes: bytes of the float workspace.
        int_bytes: bytes of the integer workspace.
    """

    graph: bool
    chunk_pages: int
    ctas: Any
    float_bytes: Any
    int_bytes: Any


def row_tile(packed: Any, head_dim: int) -> Any:
    """Return the packed rows of a CTA's tile, as `FA2DetermineCtaTileQ` does for sm_80 and newer.

    The tile has 16 rows for up to 16 packed rows, 64 for up to 64, and otherwise 128. With head_dim 256 it has at most
    64, because registers do not suffice for 128. The formula has no branch, so `packed` can be a proof's symbol.
    """
    above = [minimum(1, maximum(0, packed - edge)) for edge in (16, 64)]
    return 16 + 48 * above[0] + (64 * above[1] if head_dim < 256 else 0)


def widest_tile(head_dim: int) -> int:
    """Return the rows of the largest row tile."""
    return 128 if head_dim < 256 else 64


def max_split_ctas(attention: AttentionShape, device: DeviceProfile) -> int:
    """Return CTAs per KV head of a plan that splits keys: two per SM."""
    return 2 * device.num_sms // attention.num_kv_heads


def max_split_tiles(attention: AttentionShape, device: DeviceProfile) -> int:
    """Return the most tiles for which the plan splits keys; with more tiles a merge costs more than splitting gains."""
    return 3 * max_split_ctas(attention, device) // 4


def uniform_tiles(attention: AttentionShape, q_len: Any) -> Any:
    """Return the number of row tiles of one request with q_len rows; 1 if it fits the widest tile."""
    return ceil_div(q_len * attention.group_size, widest_tile(attention.head_dim))


def float_bytes(attention: AttentionShape, ctas: Any, tile: Any) -> Any:
    """Return bytes of `ctas` CTAs' partial outputs and log-sum-exps (`batch_prefill_tmp_v`, `batch_prefill_tmp_s`).

    Both are float32. The rows of a tile are (row, head) pairs, so all heads of a group share them.
    """
    return _partial_row(attention) * ceil_div(ctas * tile, _pairs_per_row(attention))


def _pairs_per_row(attention: AttentionShape) -> int:
    """Return the (row, head) pairs of a tile that share one partial row. Before 0.7.1 FlashInfer shares none."""
    return attention.group_size if since("0.7.1") else 1


def _partial_row(attention: AttentionShape) -> Any:
    """Return the bytes of one row's partial output and log-sum-exp, over all heads."""
    return attention.num_qo_heads * (attention.head_dim + 1) * 4


def int_bytes(ctas: Any, requests: Any, rows: Any, *, graph: bool, split: bool) -> Any:
    """Return the bytes of the plan's arrays. Each array begins at a multiple of 16 bytes."""
    size = _append(_append(4 * ctas, 4 * ctas), 4 * ctas)  # arrays of each CTA's request, row tile and key chunk
    size = _append(size, 4 * (requests + 1)) + 4  # array: each request's offset in partial results; chunk length
    if graph:
        size = _append(size, 4)  # the batch's number of rows
    if split:
        size = _append(size, 4 * (rows + 1))  # array of each row's offset in partial results
    if has_flags(graph=graph, split=split):
        size = _append(size, ctas)  # array of flags: the CTA has work
    return size


def has_flags(*, graph: bool, split: bool) -> bool:
    """Return true if a plan marks CTAs with work, in one byte each: in graph mode, before 0.7.1 if it splits keys."""
    return graph if since("0.7.1") else split


def _append(offset: Any, size: Any) -> Any:
    return ceil_div(offset, ALIGNMENT) * ALIGNMENT + size


def uniform(geometry: Geometry, q_len: Any, num_reqs: Any) -> Partition:
    """Return the plan of the pass over pages (causal or prefix pass), for num_reqs requests with q_len rows each."""
    a = geometry.attention
    tiles, limit = num_reqs * uniform_tiles(a, q_len), max_split_ctas(a, geometry.device)
    if tiles > max_split_tiles(a, geometry.device):
        return unsplit(geometry, tiles, num_reqs, num_reqs * q_len)
    tile = row_tile(q_len * a.group_size, a.head_dim)
    ints = int_bytes(limit, num_reqs, num_reqs * q_len, graph=True, split=True)
    return Partition(True, LIBRARY_SPLITS, limit, float_bytes(a, limit, tile), ints)


def masked(geometry: Geometry, q_len: Any, num_reqs: Any, masked_len: Any) -> Partition:
    """Return the plan of the masked pass over single tokens. Keys are not split, so it is equal for every length."""
    tiles = num_reqs * uniform_tiles(geometry.attention, q_len)
    ints = int_bytes(tiles, num_reqs, num_reqs * q_len, graph=False, split=False)
    return Partition(False, masked_len, tiles, 0, ints)


def unsplit(geometry: Geometry, tiles: Any, num_reqs: Any, rows: Any) -> Partition:
    """Return a plan without split-KV: one chunk of keys covers the longest request."""
    ints = int_bytes(tiles, num_reqs, rows, graph=False, split=False)
    return Partition(False, geometry.max_pages_per_req, tiles, 0, ints)


def extend(
    geometry: Geometry, q_lens: Sequence[int], pages: Sequence[int], float_room: int, int_room: int
) -> Partition:
    """Return the plan of an EXTEND batch. It splits keys only as far as the workspaces of captured modes have room.

    So EXTEND needs no workspace of its own. FlashInfer's default plan would use up to 128 rows of float32 per CTA.

    Args:
        q_lens: rows of each request.
        pages: KV pages of each request.
        float_room: bytes of the float workspace.
        int_room: bytes of the integer workspace.
    """
    a = geometry.attention
    rows, count = sum(q_lens), len(q_lens)
    tile = row_tile(rows * a.group_size // count, a.head_dim)
    tiles = [-(-n * a.group_size // tile) for n in q_lens]
    total = sum(tiles)
    seen = [max(1, n) for n in (_within_window(a, n, tile) for n in pages)]
    fixed = int_bytes(0, count, rows, graph=False, split=True) + 4 * ALIGNMENT
    per_cta = 12 + has_flags(graph=False, split=True)
    partials = float_room // _partial_row(a) * _pairs_per_row(a) // tile
    room = min(max_split_ctas(a, geometry.device), partials, (int_room - fixed) // per_cta)
    chunk, longest = max(1, 128 // a.page_size), max(seen)
    if total > room or chunk >= longest:
        return unsplit(geometry, total, count, rows)
    while chunk < longest:
        middle = (chunk + longest) // 2
        if _ctas(tiles, seen, middle) > room:
            chunk = middle + 1
        else:
            longest = middle
    cut = _ctas(tiles, seen, chunk)
    if cut == total:
        return unsplit(geometry, total, count, rows)
    ints = int_bytes(cut, count, rows, graph=False, split=True)
    return Partition(False, chunk, cut, float_bytes(a, cut, tile), ints)


def _ctas(tiles: Sequence[int], pages: Sequence[int], chunk: int) -> int:
    return sum(n * -(-m // chunk) for n, m in zip(tiles, pages, strict=True))


def _within_window(attention: AttentionShape, pages: int, tile: int) -> int:
    if attention.window_left < 0:
        return pages
    return min(-(-(attention.window_left + tile) // attention.page_size), pages)


def extend_tiles(attention: AttentionShape, rows: Any, num_reqs: Any) -> tuple[Any, Any]:
    """Return two bounds of the row tiles of an EXTEND batch, one for small and one for large tiles.

    The larger bound holds for any batch of `rows` rows in `num_reqs` requests. FlashInfer selects the tile size by the
    mean of packed rows per request. Up to a mean of 64, requests average at most two tiles. Above it, each request has
    at most one tile that is not full.
    """
    return 2 * num_reqs, rows * attention.group_size // widest_tile(attention.head_dim) + num_reqs
