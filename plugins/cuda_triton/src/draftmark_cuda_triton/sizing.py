"""Buffers of the plugin: names, shapes and bytes per batch. No torch; most formulas also accept symbolic sizes.

The kernels read page table, tail mask, depths and lengths from the batch in place. Only three things need buffers: the
KV slot of each row, the tile schedule, and the partial results of split requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from draftmark import DTYPE_BYTES, AttentionShape, BufferSpec, Geometry, Mode, ceil_div, maximum

from .heuristics import chosen, common, select, sm90, split_kv, upcast

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

WORK, ROW_TILES, PARTIAL_OUT, PARTIAL_LSE, SLOTS = "work", "row_tiles", "partial_out", "partial_lse", "slot_mapping"
UPCAST = UPCAST_K, UPCAST_V, UPCAST_TABLE = "wide_k", "wide_v", "wide_table"
"""Buffer names of `upcast_buffers`: upcast K, upcast V and their page table."""
SPLIT_BUFFERS = (WORK, PARTIAL_OUT, PARTIAL_LSE)
"""Buffer names of the split-KV schedule and the partial results, for every mode."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of one geometry, for the modes that it serves."""
    specs = [BufferSpec(SLOTS, (geometry.max_rows_any,), "int64", "max_rows")]
    if geometry.attention.chosen_width:
        return specs + chosen_buffers(geometry)
    if Mode.EXTEND in geometry.modes:
        tiles = max_row_tiles(geometry, geometry.limits.max_extend_tokens, geometry.max_reqs)
        header = common.SCHEDULE_HEADER_ROWS
        formula = f"max_extend_tokens · group / block_m + max_reqs + {header}"
        specs.append(BufferSpec(ROW_TILES, (common.SCHEDULE_HEADER_ROWS + tiles, 2), "int32", formula))
        specs += upcast_buffers(geometry)
    return specs + split_buffers(geometry, decode_verify_modes(geometry), Mode.EXTEND in geometry.modes)


def chosen_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of `chosen.ChosenKeys`, except the slot mapping: lists are split while the device has room."""
    rows, formula = (
        chosen.max_partial_rows(geometry),
        "rows · splits · KV heads · head tiles · block_m <= CTAs · block_m",
    )
    return [
        BufferSpec(WORK, (2, 4), "int32", "2: lists need no schedule"),
        BufferSpec(PARTIAL_OUT, (rows, geometry.attention.value_width), "float32", formula),
        BufferSpec(PARTIAL_LSE, (rows,), "float32", formula),
    ]


def chosen_usage(geometry: Geometry, mode: Mode, num_rows: int) -> dict[str, int]:
    """Return the bytes of partial results of a batch of `num_rows` rows with chosen keys."""
    rows = chosen.partial_rows(geometry, mode, num_rows)
    return {WORK: 2 * 4 * 4, PARTIAL_OUT: rows * geometry.attention.value_width * 4, PARTIAL_LSE: rows * 4}


def upcasts(geometry: Geometry) -> bool:
    """Check whether EXTEND can upcast K and V first. That depends on the batch, so batch invariance excludes it."""
    return not geometry.limits.batch_invariant and upcast.upcasts(geometry.attention, geometry.device)


def upcast_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of upcast K, upcast V and their page table; empty if prefill does not upcast."""
    a = geometry.attention
    if not upcasts(geometry):
        return []
    pages = upcast.upcast_pages(a, geometry.max_reqs, geometry.max_kv_len)
    table = upcast.upcast_table_cells(geometry.max_reqs, geometry.max_kv_len)
    shape, bound = (
        (pages, upcast.UPCAST_PAGE_SIZE, a.num_kv_heads, a.head_dim),
        f"max_reqs · max_kv_len / {upcast.UPCAST_PAGE_SIZE}",
    )
    formula, cells = (f"{bound}, or {room}" for room in (f"{upcast.UPCAST_BYTES >> 20} MiB", upcast.UPCAST_TABLE_CELLS))
    return [
        *(BufferSpec(name, shape, a.q_dtype, formula) for name in (UPCAST_K, UPCAST_V)),
        BufferSpec(UPCAST_TABLE, (table,), "int32", cells),
    ]


class UpcastSize(NamedTuple):
    """Holds the sizes of upcast K and V for one batch.

    Attributes:
        pages_per_request: pages of the longest request, which is the width of the upcast page table.
        pages: upper bound of the pages of all requests.
        head_groups: groups of KV heads, upcast and attended to one group after another.
    """

    pages_per_request: int
    pages: int
    head_groups: int


def plan_upcast(geometry: Geometry, batch: ForwardBatch) -> UpcastSize | None:
    """Return the sizes for upcasting K and V of an EXTEND batch, or None to read the e4m3 cache directly.

    None if the host does not bound the prefix lengths, if one KV head exceeds the buffers, or if upcasting is slower.
    """
    a, lens, rows = geometry.attention, known_prefix_lens(batch), batch.q_lens[: batch.num_reqs]
    if lens is None or not upcasts(geometry) or not upcast.upcast_pays(a, rows, lens):
        return None
    requests = list(zip(rows, lens, strict=True))
    pages_per_request = max(ceil_div(n + q, upcast.UPCAST_PAGE_SIZE) for q, n in requests)
    pages = sum(upcast.request_upcast_pages(a, q, n) for q, n in requests)
    head_groups = upcast.num_head_groups(a, pages, upcast.upcast_pages(a, geometry.max_reqs, geometry.max_kv_len))
    cells = upcast.upcast_table_cells(geometry.max_reqs, geometry.max_kv_len)
    return (
        UpcastSize(pages_per_request, pages, head_groups)
        if head_groups and batch.padded_reqs * pages_per_request <= cells
        else None
    )


def known_prefix_lens(batch: ForwardBatch) -> tuple[int, ...] | None:
    """Return the host's upper bounds of the live requests' prefix lengths, in tokens; None without bounds."""
    return getattr(batch.host, "lens", None)


def upcast_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of an EXTEND batch's pages, page table and `prefill_usage` if K and V are upcast; else empty."""
    a, found = geometry.attention, plan_upcast(geometry, batch)
    if found is None:
        return {}
    own = upcast.upcast_shape(a, found.head_groups)
    keys = found.pages * upcast.UPCAST_PAGE_SIZE * own.num_kv_heads * a.head_dim * DTYPE_BYTES[a.q_dtype]
    used = prefill_usage(replace(geometry, attention=own), batch)
    return used | {UPCAST_K: keys, UPCAST_V: keys, UPCAST_TABLE: batch.padded_reqs * found.pages_per_request * 4}


def decode_verify_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that `DecodeVerify` serves: all except EXTEND."""
    return [mode for mode in geometry.modes if mode is not Mode.EXTEND]


def decode_verify_buffers(geometry: Geometry, modes: list[Mode]) -> list[BufferSpec]:
    """Return the buffers of `decode_verify.DecodeVerify` for these modes, except the slot mapping."""
    return split_buffers(geometry, modes, False)


def split_buffers(geometry: Geometry, modes: list[Mode], prefill: bool) -> list[BufferSpec]:
    """Return the schedule and partial-result buffers for decode and verify modes and, with `prefill`, for EXTEND.

    With batch invariance no request is split, so there is one work record a request and no partial result.
    """
    if geometry.limits.batch_invariant:
        return _unsplit_buffers(geometry) if modes else []
    sizes = [split_sizes(geometry, geometry.extent(mode).q_len, geometry.max_reqs) for mode in modes]
    if prefill:
        sizes.append(prefill_split_sizes(geometry))
    if not sizes:
        return []
    # These sizes do not grow with requests or lengths. At most two requests of a split, the first and the last, have
    # parts in other splits too, and only these need partial results.
    num_splits, rows = maximum(*(one[0] for one in sizes)), maximum(*(one[1] for one in sizes))
    formula, dim = "2 · splits · KV heads · row tiles · block_m", geometry.attention.value_width
    schedule = "2 · splits; splits = 2 · SMs / (KV heads · row tiles)"
    return [
        BufferSpec(WORK, (2 * num_splits, 4), "int32", schedule),
        BufferSpec(PARTIAL_OUT, (rows, dim), "float32", formula),
        BufferSpec(PARTIAL_LSE, (rows,), "float32", formula),
    ]


def _unsplit_buffers(geometry: Geometry) -> list[BufferSpec]:
    dim, none = geometry.attention.value_width, "0: no request is split"
    return [
        BufferSpec(WORK, (geometry.max_reqs, 4), "int32", "max_reqs"),
        BufferSpec(PARTIAL_OUT, (0, dim), "float32", none),
        BufferSpec(PARTIAL_LSE, (0,), "float32", none),
    ]


def split_sizes(geometry: Geometry, q_len: Any, num_reqs: Any) -> tuple[Any, Any]:
    """Return upper bounds of KV splits and packed rows of partial results for num_reqs requests of q_len rows."""
    a, device, longest = geometry.attention, geometry.device, geometry.max_kv_len
    num_splits, rows = [], []
    for config in select.config_candidates(a, device):
        num_splits.append(split_kv.choose_num_splits(a, device, config, q_len, num_reqs, longest))
        # A cache with KV heads that are not adjacent in memory cannot merge them two by two. So the sizes cover
        # unmerged heads too, with the same number of splits.
        rows += [
            split_kv.partial_rows(a, one, num_splits[-1], q_len) for one in {config, sm90.unmerged_config(a, config)}
        ]
    return maximum(*num_splits), maximum(*rows)


def prefill_split_sizes(geometry: Geometry) -> tuple[Any, Any]:
    """Return upper bounds of KV splits and packed rows of partial results for EXTEND."""
    device = geometry.device
    found = [(a, config) for a in prefill_shapes(geometry) for config in select.prefill_candidates(a, device)]
    return (
        maximum(*(split_kv.prefill_splits(a, device, config) for a, config in found)),
        maximum(*(split_kv.prefill_partial_rows(a, device, config) for a, config in found)),
    )


def prefill_shapes(geometry: Geometry) -> list[AttentionShape]:
    """Return the attention shapes that EXTEND launches: over the cache, and over upcast K and V by head groups."""
    a = geometry.attention
    if not upcasts(geometry):
        return [a]
    return [a, *(upcast.upcast_shape(a, head_groups) for head_groups in upcast.head_group_counts(a))]


def prefill_config(geometry: Geometry) -> common.KernelConfig:
    """Return the kernel configuration of a geometry's EXTEND batches that are not split along the keys."""
    return select.select_config(geometry.attention, geometry.device, geometry.extent(Mode.EXTEND).q_len, prefill=True)


def prefill_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of row tiles, schedule and partial results that an EXTEND batch uses."""
    a, rows = geometry.attention, batch.q_lens
    used = {ROW_TILES: (common.SCHEDULE_HEADER_ROWS + max_row_tiles(geometry, sum(rows), len(rows))) * 2 * 4}
    if geometry.limits.batch_invariant:
        return used
    tiles = split_kv.ExtendTiles(a, geometry.device, prefill_config(geometry))
    if tiles.split(rows, known_prefix_lens(batch)) is not None:
        used |= _bytes(geometry, *prefill_split_sizes(geometry))
    return used


def max_row_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Return the upper bound of row tiles of an EXTEND batch with num_rows rows in num_reqs requests."""
    device = geometry.device
    min_block_m = min(
        config.block_m for a in prefill_shapes(geometry) for config in select.config_candidates(a, device)
    )
    return num_rows * geometry.attention.group_size // min_block_m + num_reqs


def decode_verify_usage(geometry: Geometry, q_len: int, num_reqs: int) -> dict[str, int]:
    """Return upper bounds of schedule and partial-result bytes of num_reqs requests with up to q_len rows each."""
    if geometry.limits.batch_invariant:
        return {WORK: num_reqs * 4 * 4}
    return _bytes(geometry, *split_sizes(geometry, q_len, num_reqs))


def _bytes(geometry: Geometry, num_splits: int, rows: int) -> dict[str, int]:
    return {WORK: 2 * num_splits * 4 * 4, PARTIAL_OUT: rows * geometry.attention.value_width * 4, PARTIAL_LSE: rows * 4}
