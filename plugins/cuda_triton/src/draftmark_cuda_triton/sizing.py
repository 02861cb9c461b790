"""The buffers. Integers only: it also runs on the symbols of a proof.

The page table, the tail mask, depths and lengths are read from the batch in place; what is kept is the slot of each
row, the schedule, and the partial results of requests that the schedule cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from draftmark import DTYPE_BYTES, AttentionShape, BufferSpec, Geometry, Mode, Role, Unit, ceil_div, maximum

from . import tiling

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

WORK, ROW_TILES, PARTIAL_OUT, PARTIAL_LSE, SLOTS = "work", "row_tiles", "partial_out", "partial_lse", "slot_mapping"
WIDE = WIDE_K, WIDE_V, WIDE_TABLE = "wide_k", "wide_v", "wide_table"
"""Names of `wide_buffers`."""
FEW_ROWS = (WORK, PARTIAL_OUT, PARTIAL_LSE)
"""Names of `few_rows_buffers`, and of what EXTEND's row tiles are cut with."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """The buffers of one geometry, for the modes that it serves."""
    specs = [BufferSpec(SLOTS, Role.SLOT_MAPPING, (geometry.max_rows_any,), "int64", Unit.TOKENS, "max_rows")]
    if Mode.EXTEND in geometry.modes:
        tiles = ragged_tiles(geometry, geometry.limits.max_extend_tokens, geometry.max_reqs)
        formula = f"max_extend_tokens · group / block_m + max_reqs, request and tile; {tiling.AGENDA_ROWS} before them"
        specs.append(
            BufferSpec(ROW_TILES, Role.SPLIT_SCHEDULE, (tiling.AGENDA_ROWS + tiles, 2), "int32", Unit.ROWS, formula)
        )
        specs += wide_buffers(geometry)
    return specs + parts_buffers(geometry, few_rows_modes(geometry), Mode.EXTEND in geometry.modes)


def wide_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Where EXTEND widens K and V, and the page table of what it has widened; none where it does not."""
    a = geometry.attention
    if not tiling.widens(a, geometry.device):
        return []
    pages = tiling.wide_pages(a, geometry.max_reqs, geometry.max_kv_len)
    table = tiling.wide_cells(geometry.max_reqs, geometry.max_kv_len)
    shape, most = (pages, tiling.WIDE_PAGE, a.num_kv_heads, a.head_dim), f"max_reqs · max_kv_len / {tiling.WIDE_PAGE}"
    formula, cells = (f"{most}, or {room}" for room in (f"{tiling.WIDE_BYTES >> 20} MiB", tiling.WIDE_CELLS))
    return [
        *(BufferSpec(name, Role.WORKSPACE, shape, a.q_dtype, Unit.PAGES, formula) for name in (WIDE_K, WIDE_V)),
        BufferSpec(WIDE_TABLE, Role.WORKSPACE, (table,), "int32", Unit.PAGES, cells),
    ]


class Widening(NamedTuple):
    """How K and V of a batch are widened.

    Attributes:
        each: pages of the longest request, and a row of the new page table. pages: of all requests, at most.
        parts: of the KV heads, that are widened and attended to one after the other.
    """

    each: int
    pages: int
    parts: int


def widening_of(geometry: Geometry, batch: ForwardBatch) -> Widening | None:
    """How K and V of a batch of EXTEND are widened first; None where they are not: where the host does not know how
    long requests may be, where a head has no room, and where it does not pay.
    """
    a, lens, rows = geometry.attention, known_lens(batch), batch.q_lens[: batch.num_reqs]
    if lens is None or not tiling.widens(a, geometry.device) or not tiling.pays_widening(a, rows, lens):
        return None
    requests = list(zip(rows, lens, strict=True))
    each = max(ceil_div(n + q, tiling.WIDE_PAGE) for q, n in requests)
    pages = sum(tiling.pages_widened(a, q, n) for q, n in requests)
    parts = tiling.wide_parts(a, pages, tiling.wide_pages(a, geometry.max_reqs, geometry.max_kv_len))
    cells = tiling.wide_cells(geometry.max_reqs, geometry.max_kv_len)
    return Widening(each, pages, parts) if parts and batch.padded_reqs * each <= cells else None


def known_lens(batch: ForwardBatch) -> tuple[int, ...] | None:
    """What the host knows of the prefixes of live requests, at most; None where it knows no more than the limit."""
    return getattr(batch.host, "lens", None)


def wide_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes that a batch of EXTEND takes whose K and V are widened: of pages and their table, and of `extend_usage`."""
    a, found = geometry.attention, widening_of(geometry, batch)
    if found is None:
        return {}
    own = tiling.widened(a, found.parts)
    keys = found.pages * tiling.WIDE_PAGE * own.num_kv_heads * a.head_dim * DTYPE_BYTES[a.q_dtype]
    used = extend_usage(replace(geometry, attention=own), batch)
    return used | {WIDE_K: keys, WIDE_V: keys, WIDE_TABLE: batch.padded_reqs * found.each * 4}


def few_rows_modes(geometry: Geometry) -> list[Mode]:
    """Modes of few rows a request: all but EXTEND."""
    return [mode for mode in geometry.modes if mode is not Mode.EXTEND]


def few_rows_buffers(geometry: Geometry, modes: list[Mode]) -> list[BufferSpec]:
    """What `few_rows.FewRows` keeps for these modes, but the slots."""
    return parts_buffers(geometry, modes, False)


def parts_buffers(geometry: Geometry, modes: list[Mode], extend: bool) -> list[BufferSpec]:
    """Schedule and partial results of these modes of few rows, and of EXTEND's row tiles."""
    cuts = [cut(geometry, geometry.extent(mode).q_len, geometry.max_reqs) for mode in modes]
    if extend:
        cuts.append(extend_cut(geometry))
    if not cuts:
        return []
    # No term in requests or in length: a piece leaves two unfinished requests at most, whatever the batch.
    pieces, rows = maximum(*(one[0] for one in cuts)), maximum(*(one[1] for one in cuts))
    formula, dim = "2 · pieces · KV heads · row tiles · block_m", geometry.attention.head_dim
    schedule = "2 · pieces; pieces = 2 · SMs / (KV heads · row tiles)"
    return [
        BufferSpec(WORK, Role.SPLIT_SCHEDULE, (2 * pieces, 4), "int32", Unit.ROWS, schedule),
        BufferSpec(PARTIAL_OUT, Role.PARTIAL_OUT, (rows, dim), "float32", Unit.ROWS, formula),
        BufferSpec(PARTIAL_LSE, Role.PARTIAL_LSE, (rows,), "float32", Unit.ROWS, formula),
    ]


def cut(geometry: Geometry, q_len: Any, num_reqs: Any) -> tuple[Any, Any]:
    """Pieces, and packed rows of partials, of forwards of so many requests with q_len rows each, at most."""
    a, device = geometry.attention, geometry.device
    pieces, rows = [], []
    for tile in tiling.candidates(a, device):
        pieces.append(tiling.pieces(a, device, tile, q_len, num_reqs, geometry.max_kv_len))
        # Two heads may not lie beside each other in a cache, and are then worked on apart, in as many pieces.
        rows += [tiling.partial_rows(a, one, pieces[-1], q_len) for one in {tile, tiling.apart(a, tile)}]
    return maximum(*pieces), maximum(*rows)


def extend_cut(geometry: Geometry) -> tuple[Any, Any]:
    """Pieces, and packed rows of partials, of EXTEND's row tiles where they are cut, at most."""
    device = geometry.device
    found = [(a, tile) for a in extend_shapes(geometry) for tile in tiling.extend_candidates(a, device)]
    return (
        maximum(*(tiling.shares(a, device, tile) for a, tile in found)),
        maximum(*(tiling.partial_rows_of_shares(a, device, tile) for a, tile in found)),
    )


def extend_shapes(geometry: Geometry) -> list[AttentionShape]:
    """The attention of EXTEND's launches: to the cache, and to what is widened of all of its heads or of some."""
    a = geometry.attention
    if not tiling.widens(a, geometry.device):
        return [a]
    return [a, *(tiling.widened(a, parts) for parts in tiling.parts_of_heads(a))]


def extend_tile(geometry: Geometry) -> tiling.Tile:
    """The tile of all of a geometry's batches of EXTEND."""
    return tiling.choose(geometry.attention, geometry.device, geometry.extent(Mode.EXTEND).q_len, extend=True)


def extend_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of row tiles, and of schedule and partials where those are cut, that a batch of EXTEND takes."""
    a, rows = geometry.attention, batch.q_lens
    used = {ROW_TILES: (tiling.AGENDA_ROWS + ragged_tiles(geometry, sum(rows), len(rows))) * 2 * 4}
    if tiling.cut_tile(a, geometry.device, extend_tile(geometry), rows, known_lens(batch)) is not None:
        used |= _bytes(geometry, *extend_cut(geometry))
    return used


def ragged_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Row tiles of an EXTEND forward of so many rows and requests, at most."""
    device = geometry.device
    least = min(tile.block_m for a in extend_shapes(geometry) for tile in tiling.candidates(a, device))
    return num_rows * geometry.attention.group_size // least + num_reqs


def few_rows_usage(geometry: Geometry, q_len: int, num_reqs: int) -> dict[str, int]:
    """Bytes of schedule and partials that a batch of at most q_len rows a request takes; of partials, at most."""
    return _bytes(geometry, *cut(geometry, q_len, num_reqs))


def _bytes(geometry: Geometry, pieces: int, rows: int) -> dict[str, int]:
    return {WORK: 2 * pieces * 4 * 4, PARTIAL_OUT: rows * geometry.attention.head_dim * 4, PARTIAL_LSE: rows * 4}
