"""EXTEND by itself: prefill and its chunks, from the batch's own lengths and page table. No plan, no host lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import boxes, launch, sizing, tiling
from .again import Again
from .launch import Attention, Cut
from .remembered import Layout, Remembered, layers_of

COPY_ALIGNMENT = 16
"""Bytes that the copy engine wants of an address and of a pitch."""
MOVING = (
    *("q", "k_source", "v_source", "k_scale", "v_scale", "sinks", "out"),
    *("prefix_lens", "q_indptr", "page_table"),
)
"""The kernel's parameters that another layer or step brings, in the order of `Extend._launch`."""
OTHERS = {"k_other": "k_source", "v_other": "v_source"}
"""Its further descriptors, which are of the same tensors (`boxes.describe`)."""
Source = tuple[torch.Tensor | None, ...]
"""What is attended to: K and V ``[pages, P, KV heads, head_dim]``, their scales, and the sinks that count."""


@dataclass(frozen=True, eq=False)
class Way:
    """How batches are worked on. Each is itself, and no other: it is part of the key of launches.

    Attributes:
        tile: see `tiling`. cut: how its row tiles are cut by their keys, if they may be.
    """

    tile: tiling.Tile
    cut: Cut | None


class Extend:
    """Ragged causal attention of one geometry, for any backend whose buffers hold slots and row tiles.

    Serves what `support.reasons_against` finds nothing against. On CPU tensors it runs in Triton's interpreter.

    Args:
        slots: int64 ``[max rows]``, the caller's; `write_metadata` writes the KV slot of each row.
        row_tiles: int32 ``[n, 2]``, the caller's; the agenda, then request and index of each row tile. n is at least
            `tiling.AGENDA_ROWS` + max_extend_tokens · group // b + max_reqs for tiles of b packed rows, and b is never
            under `tiling.LEAST_ROWS`, so that with b = LEAST_ROWS it always suffices. On Hopper a forward counts there
            what was taken, and leaves it as it was: one stream at a time attends with them.
        buffers: the caller's, of `sizing.parts_buffers`, by name. With them few row tiles are cut by their keys, and
            merged; without, never.
        page_size: of the batches' page tables, where the pages that are attended to are others (`wide`).
    """

    def __init__(
        self,
        geometry: Geometry,
        slots: torch.Tensor,
        row_tiles: torch.Tensor,
        buffers: Mapping[str, torch.Tensor] | None = None,
        page_size: int | None = None,
    ) -> None:
        self._geometry, self._slots, self._row_tiles = geometry, slots, row_tiles
        self._shape = Attention.of(geometry, slots.is_cuda)
        self._paged = self._shape if page_size is None else replace(self._shape, page_size=page_size)
        self._again, self._layer = Again(MOVING, OTHERS), layers_of(geometry)
        self._tile, self._buffers = sizing.extend_tile(geometry), buffers
        self._whole, self._cut = self._way(self._tile, 1), self._cut_ways()
        self._of = Remembered[ForwardBatch, Way](self._way_of)
        self._ready = set[Layout]()

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row, the row tiles, and how they are cut, in one launch.

        Raises:
            BatchError: the batch needs more row tiles than there is room for.
        """
        way = self._of(batch)
        count = tiling.ragged_tiles(way.tile, self._shape.group, batch.num_rows, batch.padded_reqs)
        slots, tiles = self._slots[: batch.num_rows], self._row_tiles
        room = tiles.shape[0] - tiling.AGENDA_ROWS
        if count > room:
            raise BatchError(
                f"EXTEND has {batch.num_rows} rows of {batch.padded_reqs} requests, up to {count} row tiles, but "
                f"{room} are allocated; raise max_num_reqs or max_extend_tokens"
            )
        schedule = () if way.cut is None else (way.cut.work, way.cut.pieces, way.cut.programs)
        record_call(
            launch.write_metadata_ragged, self._paged, way.tile, batch.num_rows, batch.prefix_lens,
            batch.q_indptr, batch.page_table, slots, tiles, batch.slots, *schedule,
            mutates=(slots, tiles, *schedule[:1]),
        )  # fmt: skip

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows in one launch, and a merge where row tiles are cut.

        Args:
            q, out: ``[rows, query heads, head_dim]``, head_dim contiguous.
        """
        layout, sinks = self._layer(cache)
        source = (cache.k, cache.v, cache.k_scale, cache.v_scale, sinks)
        self.attend_to(source, layout, batch.page_table, q, batch, out)

    def attend_to(
        self,
        source: Source,
        cache_layout: Layout,
        table: torch.Tensor,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """The same over pages that may be others than a cache's.

        Args:
            cache_layout: all that launches take from `source` but addresses. table: of its pages.
        """
        rows, way = batch.num_rows, self._of(batch)
        tensors = moving(source, table, q, batch, out)
        if not self._slots.is_cuda:
            check_rows(q, out)
            partials = () if way.cut is None else (way.cut.partial_out, way.cut.partial_lse)
            record_call(self._launch, rows, way.tile, way.cut, *tensors, self._row_tiles, mutates=(out, *partials))
            return
        layout = (
            *(rows, batch.padded_reqs, way, table.stride(0), cache_layout),
            *(q.stride(), out.stride(), q.dtype, out.dtype),
        )  # fmt: skip
        if self._cut and cache_layout not in self._ready:
            self.get_ready(source, cache_layout, table, q, batch, out)
        self._again(layout, tensors, self._launch_own, rows, way)

    def get_ready(
        self,
        source: Source,
        cache_layout: Layout,
        table: torch.Tensor,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Launch all that batches over such pages may be launched with, for no row tile: what is compiled when a
        server first needs it holds up everybody for seconds. It takes what `attend_to` does.
        """
        if cache_layout in self._ready or torch.cuda.is_current_stream_capturing():
            return
        self._ready.add(cache_layout)
        tensors = moving(source, table, q, batch, out)
        most = max((cut.pieces for way in self._cut.values() if (cut := way.cut) is not None), default=1)
        nothing = torch.zeros(max(2 * most * 4, 2 * tiling.AGENDA_ROWS), dtype=torch.int32, device=self._slots.device)
        for way in (self._whole, *self._cut.values()):
            cut = None if way.cut is None else way.cut._replace(work=nothing)
            self._launch(batch.num_rows, way.tile, cut, *tensors, nothing)  # type: ignore[call-arg,arg-type]

    def _way_of(self, batch: ForwardBatch) -> Way:
        """The schedule, which knows the lengths, says if row tiles are cut; but where it is asked a merge is launched,
        and the kernel is slower by 3 to 15 % than that which never cuts. So the host says no where it knows better.
        """
        a, device = self._geometry.attention, self._geometry.device
        rows, lens = batch.q_lens, sizing.known_lens(batch)
        tile = None if self._buffers is None else tiling.cut_tile(a, device, self._tile, rows, lens)
        if tile is None:
            return self._whole
        pays = tiling.pays_cutting(a, device, tile, rows, lens)
        return self._cut[tile] if pays else self._whole

    def _cut_ways(self) -> dict[tiling.Tile, Way]:
        """By the tile, how batches are worked on whose row tiles may be cut."""
        a, device = self._geometry.attention, self._geometry.device
        tiles = () if self._buffers is None else tiling.cut_tiles(a, self._tile)
        pieces = {tile: tiling.shares(a, device, tile) for tile in tiles}
        return {tile: self._way(tile, count) for tile, count in pieces.items() if count > 1}

    def _way(self, tile: tiling.Tile, pieces: int) -> Way:
        if not self._slots.is_cuda:
            a, longest = self._geometry.attention, self._geometry.max_kv_len
            tile, pieces = tiling.interpreted_ragged(a, tile, longest, pieces)
        buffers = self._buffers
        if buffers is None or pieces == 1:
            return Way(tile, None)
        places = self._geometry.device.num_sms * tile.programs_per_sm
        return Way(tile, Cut(pieces, places, *(buffers[name] for name in sizing.FEW_ROWS)))

    def _launch_own(self, num_rows: int, way: Way, *tensors: torch.Tensor) -> None:
        check_rows(tensors[0], tensors[MOVING.index("out")])
        self._launch(num_rows, way.tile, way.cut, *tensors, self._row_tiles)  # type: ignore[call-arg]  # as MOVING

    def _launch(
        self,
        num_rows: int,
        tile: tiling.Tile,
        cut: Cut | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        prefix_lens: torch.Tensor,
        q_indptr: torch.Tensor,
        page_table: torch.Tensor,
        row_tiles: torch.Tensor,
    ) -> None:
        a, device = self._geometry.attention, self._geometry.device
        tile = tiling.for_cache(a, device, tile, has_one_pitch(k, v), has_boxes(k, v), has_heads_beside(k, v))
        launch.attend_extend(
            self._shape, tile, num_rows, q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table, row_tiles, out,
            None, sinks, cut,
        )  # fmt: skip


def moving(
    source: Source, table: torch.Tensor, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of MOVING, of what `Extend.attend_to` takes."""
    return (q, *source, out, batch.prefix_lens, batch.q_indptr, table)


def check_rows(q: torch.Tensor, out: torch.Tensor) -> None:
    """Raise BatchError unless the kernels can read q and write out."""
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise BatchError("q and out must have head_dim contiguous; call contiguous() on them")


def has_boxes(*caches: torch.Tensor, heads: int = 1) -> bool:
    """Whether `hopper` can read K and V, as many heads at a time, which lie beside each other."""
    told = all(one.is_cuda and boxes.describable(boxes.beside(one, heads)) for one in caches)
    return told and boxes.available()


def has_one_pitch(*caches: torch.Tensor) -> bool:
    """Whether K's tokens are rows of one pitch, and V's, as a copy box describes them: views of packed pages too."""
    return all(_one_pitch(one) for one in caches)


def has_heads_beside(*caches: torch.Tensor) -> bool:
    """Whether a token's heads lie beside each other, in K and in V."""
    return all(one.stride(2) == one.shape[3] for one in caches)


def _one_pitch(tensor: torch.Tensor) -> bool:
    pages, tokens, heads, last = tensor.stride()
    size, dim, unit = tensor.shape[1], tensor.shape[3], tensor.element_size()
    aligned = tokens * unit % COPY_ALIGNMENT == 0 and tensor.data_ptr() % COPY_ALIGNMENT == 0
    return pages == size * tokens and heads == dim and last == 1 and aligned
