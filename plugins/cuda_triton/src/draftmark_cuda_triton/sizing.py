"""The buffers. Integers only: it also runs on the symbols of a proof.

The page table, the tail mask, depths and lengths are read from the batch in place; what is kept is the slot of each
row, the schedule, and the partial results of requests that the schedule cut.
"""

from __future__ import annotations

from typing import Any

from draftmark import BufferSpec, Geometry, Mode, Role, Unit, maximum

from . import tiling

WORK, ROW_TILES, PARTIAL_OUT, PARTIAL_LSE, SLOTS = "work", "row_tiles", "partial_out", "partial_lse", "slot_mapping"


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """The buffers of one geometry, for the modes that it serves."""
    a = geometry.attention
    specs = [BufferSpec(SLOTS, Role.SLOT_MAPPING, (geometry.max_rows_any,), "int64", Unit.TOKENS, "max_rows")]
    if Mode.EXTEND in geometry.modes:
        tiles = ragged_tiles(geometry, geometry.limits.max_extend_tokens, geometry.max_reqs)
        formula = "max_extend_tokens · group / block_m + max_reqs, request and tile"
        specs.append(BufferSpec(ROW_TILES, Role.SPLIT_SCHEDULE, (tiles, 2), "int32", Unit.ROWS, formula))
    uniform = [mode for mode in geometry.modes if mode is not Mode.EXTEND]
    if uniform:
        cuts = [cut(geometry, geometry.extent(mode).q_len, geometry.max_reqs) for mode in uniform]
        # No term in requests or in length: a piece leaves two unfinished requests at most, whatever the batch.
        pieces, rows = maximum(*(cut[0] for cut in cuts)), maximum(*(cut[1] for cut in cuts))
        formula = "2 · pieces · KV heads · row tiles · block_m"
        specs += [
            BufferSpec(WORK, Role.SPLIT_SCHEDULE, (pieces, 4), "int32", Unit.ROWS, "2 · SMs / (KV heads · row tiles)"),
            BufferSpec(PARTIAL_OUT, Role.PARTIAL_OUT, (rows, a.head_dim), "float32", Unit.ROWS, formula),
            BufferSpec(PARTIAL_LSE, Role.PARTIAL_LSE, (rows,), "float32", Unit.ROWS, formula),
        ]
    return specs


def cut(geometry: Geometry, q_len: Any, num_reqs: Any) -> tuple[Any, Any]:
    """Pieces, and packed rows of partials, of forwards of so many requests with q_len rows each."""
    a, device = geometry.attention, geometry.device
    tile = tiling.choose(a, device, q_len)
    pieces = tiling.pieces(a, device, tile, q_len, num_reqs, geometry.max_kv_len)
    return pieces, tiling.partial_rows(a, tile, pieces, q_len)


def ragged_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Row tiles of an EXTEND forward of so many rows and requests, at most."""
    tile = tiling.choose(geometry.attention, geometry.device, geometry.extent(Mode.EXTEND).q_len)
    return tiling.ragged_tiles(tile, geometry.attention.group_size, num_rows, num_reqs)
