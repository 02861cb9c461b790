"""The buffers. Integers only: it also runs on the symbols of a proof.

The page table, the tail mask, depths and lengths are read from the batch in place; what is kept is the slot of each
row, the schedule, and the partial results of requests that the schedule cut.
"""

from __future__ import annotations

from typing import Any

from draftmark import BufferSpec, Geometry, Mode, Role, Unit, maximum

from . import tiling

WORK, ROW_TILES, PARTIAL_OUT, PARTIAL_LSE, SLOTS = "work", "row_tiles", "partial_out", "partial_lse", "slot_mapping"
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
    return specs + parts_buffers(geometry, few_rows_modes(geometry), Mode.EXTEND in geometry.modes)


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
    a, device = geometry.attention, geometry.device
    tiles = tiling.extend_candidates(a, device)
    return (
        maximum(*(tiling.shares(a, device, tile) for tile in tiles)),
        maximum(*(tiling.partial_rows_of_shares(a, device, tile) for tile in tiles)),
    )


def extend_tile(geometry: Geometry) -> tiling.Tile:
    """The tile of all of a geometry's batches of EXTEND."""
    return tiling.choose(geometry.attention, geometry.device, geometry.extent(Mode.EXTEND).q_len, extend=True)


def extend_usage(geometry: Geometry, q_lens: tuple[int, ...]) -> dict[str, int]:
    """Bytes of row tiles, and of schedule and partials where those are cut, that an EXTEND of so many rows takes."""
    used = {ROW_TILES: (tiling.AGENDA_ROWS + ragged_tiles(geometry, sum(q_lens), len(q_lens))) * 2 * 4}
    if tiling.cut_tile(geometry.attention, geometry.device, extend_tile(geometry), q_lens) is not None:
        used |= _bytes(geometry, *extend_cut(geometry))
    return used


def ragged_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Row tiles of an EXTEND forward of so many rows and requests, at most."""
    a = geometry.attention
    least = min(tile.block_m for tile in tiling.candidates(a, geometry.device))
    return num_rows * a.group_size // least + num_reqs


def few_rows_usage(geometry: Geometry, q_len: int, num_reqs: int) -> dict[str, int]:
    """Bytes of schedule and partials that a batch of at most q_len rows a request takes; of partials, at most."""
    return _bytes(geometry, *cut(geometry, q_len, num_reqs))


def _bytes(geometry: Geometry, pieces: int, rows: int) -> dict[str, int]:
    return {WORK: 2 * pieces * 4 * 4, PARTIAL_OUT: rows * geometry.attention.head_dim * 4, PARTIAL_LSE: rows * 4}
