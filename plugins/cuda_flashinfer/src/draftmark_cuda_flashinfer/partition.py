"""How FlashInfer's FA2 plan cuts a batch, and the bytes of the plan. Integers only, no torch.

Written from `PrefillPlan` of `attention/scheduler.cuh`, FlashInfer 0.7.2. Every CTA takes one tile of packed
rows (query rows x heads of a group) against one chunk of keys.

* Few tiles, under three quarters of two CTAs a multiprocessor: the plan cuts the keys. The grid is padded to a fixed
  number of CTAs, so that it can be captured, and partial results are merged.
* More tiles than that are never cut. Then the grid is the tiles themselves, it depends on no length, nothing is merged,
  and no float workspace is read. FlashInfer's own wrappers reserve one here too, which is what grows to gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftmark import AttentionShape, DeviceProfile, Geometry, ceil_div, maximum, minimum

ALIGNMENT = 16
LIBRARY_SPLITS = -1
"""`fixed_split_size` that leaves the chunk to FlashInfer's own search."""


@dataclass(frozen=True)
class Partition:
    """One plan in integers.

    Attributes:
        graph: the grid is padded to `ctas`, whatever the lengths; otherwise it is what the batch needs.
        chunk_pages: keys of a CTA in pages, or `LIBRARY_SPLITS`.
        ctas: CTAs a KV head.
        float_bytes, int_bytes: of the two workspaces.
    """

    graph: bool
    chunk_pages: int
    ctas: Any
    float_bytes: Any
    int_bytes: Any


def row_tile(packed: Any, head_dim: int) -> Any:
    """Packed rows of a CTA (`FA2DetermineCtaTileQ`, sm_80 and newer, head_dim up to 256), without a branch.

    16 up to 16 packed rows, 64 up to 64, then 128, which a head_dim of 256 has no registers for.
    """
    above = [minimum(1, maximum(0, packed - edge)) for edge in (16, 64)]
    return 16 + 48 * above[0] + (64 * above[1] if head_dim < 256 else 0)


def widest_tile(head_dim: int) -> int:
    """The largest row tile there is."""
    return 128 if head_dim < 256 else 64


def max_split_ctas(attention: AttentionShape, device: DeviceProfile) -> int:
    """CTAs a KV head of a plan that cuts keys: two a multiprocessor."""
    return 2 * device.num_sms // attention.num_kv_heads


def most_cut_tiles(attention: AttentionShape, device: DeviceProfile) -> int:
    """Tiles up to which keys are cut: with fewer CTAs than a quarter to spare, the merge costs more than it spreads."""
    return 3 * max_split_ctas(attention, device) // 4


def uniform_tiles(attention: AttentionShape, q_len: Any) -> Any:
    """Row tiles of one request with q_len rows. Fewer rows than the widest tile has are one tile of a smaller kind."""
    return ceil_div(q_len * attention.group_size, widest_tile(attention.head_dim))


def float_bytes(attention: AttentionShape, ctas: Any, tile: Any) -> Any:
    """Partial outputs and log-sum-exps of `ctas` CTAs (`batch_prefill_tmp_v`, `batch_prefill_tmp_s`), fp32-wide.

    A tile's rows are (row, head) pairs: all heads of a group share them. 0.6.18 counted each as a row of every head.
    """
    return _partial_row(attention) * ceil_div(ctas * tile, attention.group_size)


def _partial_row(attention: AttentionShape) -> Any:
    """Bytes of one row's partial output and log-sum-exp, of all heads."""
    return attention.num_qo_heads * (attention.head_dim + 1) * 4


def int_bytes(ctas: Any, requests: Any, rows: Any, *, graph: bool, split: bool) -> Any:
    """The plan's arrays, each from a multiple of 16 bytes on."""
    size = _after(_after(4 * ctas, 4 * ctas), 4 * ctas)  # request, row tile and chunk of each CTA
    size = _after(size, 4 * (requests + 1)) + 4  # where a request's partials begin; the chunk's length
    if graph:
        size = _after(size, 4)  # rows
    if split:
        size = _after(size, 4 * (rows + 1))  # where a row's partials begin
    if graph:
        size = _after(size, ctas)  # which CTAs are real
    return size


def _after(offset: Any, size: Any) -> Any:
    return ceil_div(offset, ALIGNMENT) * ALIGNMENT + size


def uniform(geometry: Geometry, q_len: Any, num_reqs: Any) -> Partition:
    """The plan of num_reqs requests with q_len rows each: of the causal or the common level."""
    a = geometry.attention
    tiles, limit = num_reqs * uniform_tiles(a, q_len), max_split_ctas(a, geometry.device)
    if tiles > most_cut_tiles(a, geometry.device):
        return unsplit(geometry, tiles, num_reqs, num_reqs * q_len)
    tile = row_tile(q_len * a.group_size, a.head_dim)
    ints = int_bytes(limit, num_reqs, num_reqs * q_len, graph=True, split=True)
    return Partition(True, LIBRARY_SPLITS, limit, float_bytes(a, limit, tile), ints)


def masked(geometry: Geometry, q_len: Any, num_reqs: Any, masked_len: Any) -> Partition:
    """The plan of the masked level: one chunk a tile, the same for every length, of single tokens."""
    tiles = num_reqs * uniform_tiles(geometry.attention, q_len)
    ints = int_bytes(tiles, num_reqs, num_reqs * q_len, graph=False, split=False)
    return Partition(False, masked_len, tiles, 0, ints)


def unsplit(geometry: Geometry, tiles: Any, num_reqs: Any, rows: Any) -> Partition:
    """A plan that cuts no keys: a chunk holds any request."""
    ints = int_bytes(tiles, num_reqs, rows, graph=False, split=False)
    return Partition(False, geometry.max_pages_per_req, tiles, 0, ints)


def extend(
    geometry: Geometry, q_lens: Sequence[int], pages: Sequence[int], float_room: int, int_room: int
) -> Partition:
    """The plan of a ragged batch. Keys are cut as far as the workspaces of the captured modes have room.

    So a prefill reserves nothing: FlashInfer's own plan would take up to 128 rows of fp32 for every one of its CTAs.

    Args:
        q_lens, pages: rows and KV pages of each request.
        float_room, int_room: bytes of the two workspaces.
    """
    a = geometry.attention
    rows, count = sum(q_lens), len(q_lens)
    tile = row_tile(rows * a.group_size // count, a.head_dim)
    tiles = [-(-n * a.group_size // tile) for n in q_lens]
    total = sum(tiles)
    seen = [max(1, n) for n in (_within_window(a, n, tile) for n in pages)]
    fixed = int_bytes(0, count, rows, graph=False, split=True) + 3 * ALIGNMENT
    partials = float_room // _partial_row(a) * a.group_size // tile
    room = min(max_split_ctas(a, geometry.device), partials, (int_room - fixed) // 12)
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
    """Two bounds, the larger of which no ragged split of `rows` over `num_reqs` requests exceeds in row tiles.

    The tile follows the mean of the packed rows: below 65 a request it holds under two tiles; above, the widest tile
    wastes less than one.
    """
    return 2 * num_reqs, rows * attention.group_size // widest_tile(attention.head_dim) + num_reqs
