"""The buffers. Integers only: it also runs on the symbols of a proof.

The page table, the tail mask, depths and lengths are read from the batch in place; what is kept is the slot of each
row, the schedule, and the partial results of requests that the schedule cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from draftmark import DTYPE_BYTES, AttentionShape, BufferSpec, Geometry, Mode, Role, Unit, ceil_div, maximum

from .heuristics import common, select, sm90, split_kv, upcast

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

WORK, ROW_TILES, PARTIAL_OUT, PARTIAL_LSE, SLOTS = "work", "row_tiles", "partial_out", "partial_lse", "slot_mapping"
UPCAST = UPCAST_K, UPCAST_V, UPCAST_TABLE = "wide_k", "wide_v", "wide_table"
"""Names of `upcast_buffers`."""
SPLIT_BUFFERS = (WORK, PARTIAL_OUT, PARTIAL_LSE)
"""Names of `decode_verify_buffers`, and of what EXTEND's row tiles are cut with."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """The buffers of one geometry, for the modes that it serves."""
    specs = [BufferSpec(SLOTS, Role.SLOT_MAPPING, (geometry.max_rows_any,), "int64", Unit.TOKENS, "max_rows")]
    if Mode.EXTEND in geometry.modes:
        tiles = max_row_tiles(geometry, geometry.limits.max_extend_tokens, geometry.max_reqs)
        header = common.SCHEDULE_HEADER_ROWS
        formula = f"max_extend_tokens · group / block_m + max_reqs, request and tile; {header} before them"
        specs.append(
            BufferSpec(
                ROW_TILES, Role.SPLIT_SCHEDULE, (common.SCHEDULE_HEADER_ROWS + tiles, 2), "int32", Unit.ROWS, formula
            )
        )
        specs += upcast_buffers(geometry)
    return specs + split_buffers(geometry, decode_verify_modes(geometry), Mode.EXTEND in geometry.modes)


def upcast_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Where EXTEND widens K and V, and the page table of what it has widened; none where it does not."""
    a = geometry.attention
    if not upcast.upcasts(a, geometry.device):
        return []
    pages = upcast.upcast_pages(a, geometry.max_reqs, geometry.max_kv_len)
    table = upcast.upcast_table_cells(geometry.max_reqs, geometry.max_kv_len)
    shape, bound = (
        (pages, upcast.UPCAST_PAGE_SIZE, a.num_kv_heads, a.head_dim),
        f"max_reqs · max_kv_len / {upcast.UPCAST_PAGE_SIZE}",
    )
    formula, cells = (f"{bound}, or {room}" for room in (f"{upcast.UPCAST_BYTES >> 20} MiB", upcast.UPCAST_TABLE_CELLS))
    return [
        *(BufferSpec(name, Role.WORKSPACE, shape, a.q_dtype, Unit.PAGES, formula) for name in (UPCAST_K, UPCAST_V)),
        BufferSpec(UPCAST_TABLE, Role.WORKSPACE, (table,), "int32", Unit.PAGES, cells),
    ]


class UpcastSize(NamedTuple):
    """How K and V of a batch are widened.

    Attributes:
        pages_per_request: pages of the longest request, and a row of the new page table. pages: of all requests, at
            most.
        head_groups: of the KV heads, that are widened and attended to one after the other.
    """

    pages_per_request: int
    pages: int
    head_groups: int


def plan_upcast(geometry: Geometry, batch: ForwardBatch) -> UpcastSize | None:
    """How K and V of a batch of EXTEND are widened first; None where they are not: where the host does not know how
    long requests may be, where a head has no room, and where it does not pay.
    """
    a, lens, rows = geometry.attention, known_prefix_lens(batch), batch.q_lens[: batch.num_reqs]
    if lens is None or not upcast.upcasts(a, geometry.device) or not upcast.upcast_pays(a, rows, lens):
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
    """What the host knows of the prefixes of live requests, at most; None where it knows no more than the limit."""
    return getattr(batch.host, "lens", None)


def upcast_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes that a batch of EXTEND takes whose K and V are upcast: pages, their table, and `prefill_usage`."""
    a, found = geometry.attention, plan_upcast(geometry, batch)
    if found is None:
        return {}
    own = upcast.upcast_shape(a, found.head_groups)
    keys = found.pages * upcast.UPCAST_PAGE_SIZE * own.num_kv_heads * a.head_dim * DTYPE_BYTES[a.q_dtype]
    used = prefill_usage(replace(geometry, attention=own), batch)
    return used | {UPCAST_K: keys, UPCAST_V: keys, UPCAST_TABLE: batch.padded_reqs * found.pages_per_request * 4}


def decode_verify_modes(geometry: Geometry) -> list[Mode]:
    """Modes of few rows a request: all but EXTEND."""
    return [mode for mode in geometry.modes if mode is not Mode.EXTEND]


def decode_verify_buffers(geometry: Geometry, modes: list[Mode]) -> list[BufferSpec]:
    """What `decode_verify.DecodeVerify` keeps for these modes, but the slots."""
    return split_buffers(geometry, modes, False)


def split_buffers(geometry: Geometry, modes: list[Mode], prefill: bool) -> list[BufferSpec]:
    """Schedule and partial results of these modes of few rows, and of EXTEND's row tiles."""
    sizes = [split_sizes(geometry, geometry.extent(mode).q_len, geometry.max_reqs) for mode in modes]
    if prefill:
        sizes.append(prefill_split_sizes(geometry))
    if not sizes:
        return []
    # No term in requests or in length: a piece leaves two unfinished requests at most, whatever the batch.
    num_splits, rows = maximum(*(one[0] for one in sizes)), maximum(*(one[1] for one in sizes))
    formula, dim = "2 · pieces · KV heads · row tiles · block_m", geometry.attention.head_dim
    schedule = "2 · pieces; pieces = 2 · SMs / (KV heads · row tiles)"
    return [
        BufferSpec(WORK, Role.SPLIT_SCHEDULE, (2 * num_splits, 4), "int32", Unit.ROWS, schedule),
        BufferSpec(PARTIAL_OUT, Role.PARTIAL_OUT, (rows, dim), "float32", Unit.ROWS, formula),
        BufferSpec(PARTIAL_LSE, Role.PARTIAL_LSE, (rows,), "float32", Unit.ROWS, formula),
    ]


def split_sizes(geometry: Geometry, q_len: Any, num_reqs: Any) -> tuple[Any, Any]:
    """Pieces, and packed rows of partials, of forwards of so many requests with q_len rows each, at most."""
    a, device = geometry.attention, geometry.device
    num_splits, rows = [], []
    for config in select.config_candidates(a, device):
        num_splits.append(split_kv.choose_num_splits(a, device, config, q_len, num_reqs, geometry.max_kv_len))
        # Two heads may not lie beside each other in a cache, and are then worked on apart, in as many pieces.
        rows += [
            split_kv.partial_rows(a, one, num_splits[-1], q_len) for one in {config, sm90.unmerged_config(a, config)}
        ]
    return maximum(*num_splits), maximum(*rows)


def prefill_split_sizes(geometry: Geometry) -> tuple[Any, Any]:
    """Pieces, and packed rows of partials, of EXTEND's row tiles where they are cut, at most."""
    device = geometry.device
    found = [(a, config) for a in prefill_shapes(geometry) for config in select.prefill_candidates(a, device)]
    return (
        maximum(*(split_kv.prefill_splits(a, device, config) for a, config in found)),
        maximum(*(split_kv.prefill_partial_rows(a, device, config) for a, config in found)),
    )


def prefill_shapes(geometry: Geometry) -> list[AttentionShape]:
    """The attention of EXTEND's launches: to the cache, and to what is widened of all of its heads or of some."""
    a = geometry.attention
    if not upcast.upcasts(a, geometry.device):
        return [a]
    return [a, *(upcast.upcast_shape(a, head_groups) for head_groups in upcast.head_group_counts(a))]


def prefill_config(geometry: Geometry) -> common.KernelConfig:
    """The tile of all of a geometry's batches of EXTEND."""
    return select.select_config(geometry.attention, geometry.device, geometry.extent(Mode.EXTEND).q_len, prefill=True)


def prefill_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of row tiles, and of schedule and partials where those are cut, that a batch of EXTEND takes."""
    a, rows = geometry.attention, batch.q_lens
    used = {ROW_TILES: (common.SCHEDULE_HEADER_ROWS + max_row_tiles(geometry, sum(rows), len(rows))) * 2 * 4}
    if split_kv.split_config(a, geometry.device, prefill_config(geometry), rows, known_prefix_lens(batch)) is not None:
        used |= _bytes(geometry, *prefill_split_sizes(geometry))
    return used


def max_row_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Row tiles of an EXTEND forward of so many rows and requests, at most."""
    device = geometry.device
    least = min(config.block_m for a in prefill_shapes(geometry) for config in select.config_candidates(a, device))
    return num_rows * geometry.attention.group_size // least + num_reqs


def decode_verify_usage(geometry: Geometry, q_len: int, num_reqs: int) -> dict[str, int]:
    """Bytes of schedule and partials that a batch of at most q_len rows a request takes; of partials, at most."""
    return _bytes(geometry, *split_sizes(geometry, q_len, num_reqs))


def _bytes(geometry: Geometry, num_splits: int, rows: int) -> dict[str, int]:
    return {WORK: 2 * num_splits * 4 * 4, PARTIAL_OUT: rows * geometry.attention.head_dim * 4, PARTIAL_LSE: rows * 4}
