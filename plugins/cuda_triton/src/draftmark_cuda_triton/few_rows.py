"""Few rows a request: every mode but EXTEND, from the batch's own lengths and page table. No plan, no host lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Block, ForwardBatch, KVCache, Tree, record_call

from . import boxes, extend, launch, sizing, tiling
from .again import MOST_KNOWN, Again
from .extend import check_rows, has_boxes, has_heads_beside, has_one_pitch
from .launch import Attention, Extent
from .remembered import Remembered, layers_of

MOVING = (*extend.MOVING, "tail_mask", "tail_depth")
"""The kernels' parameters that another layer or step brings, in the order of `FewRows._launch`."""
OF_STEP = ("prefix_lens", "page_table", "slot_mapping", "work", "q_indptr", "given_slots")
"""Those of `write_metadata`, in the order of `launch.write_metadata`."""


@dataclass(frozen=True, eq=False)
class Cut:
    """How batches of one size are cut. Each is itself, and no other: it is part of the key of launches.

    Attributes:
        tile, pieces: see `tiling`.
    """

    extent: Extent
    tile: tiling.Tile
    pieces: int


Facts = tuple[tuple[Cut, bool, int, int | None], torch.Tensor | None, torch.Tensor | None]
"""Of a batch: its cut, whether its tail is a block, pitches of page table and mask; then its tree's mask and depth."""


class FewRows:
    """Attention of one geometry's modes of few rows, uniform or ragged, for any backend whose buffers hold their state.

    Serves what `support.reasons_against` finds nothing against. On CPU tensors it runs in Triton's interpreter.

    Args:
        slots: int64 ``[max rows]``, the caller's; `write_metadata` writes the KV slot of each row.
        buffers: the caller's, of `sizing.few_rows_buffers`, by name.
    """

    def __init__(self, geometry: Geometry, slots: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> None:
        self._geometry, self._slots = geometry, slots
        self._work = buffers[sizing.WORK]
        self._partial_out, self._partial_lse = buffers[sizing.PARTIAL_OUT], buffers[sizing.PARTIAL_LSE]
        self._shape = Attention.of(geometry, slots.is_cuda)
        self._cuts: dict[tuple[int, ...], Cut] = {}
        self._again, self._written = Again(MOVING, extend.OTHERS), Again(OF_STEP, rare=True)
        self._facts = Remembered[ForwardBatch, Facts](self._of_batch)
        self._layer = layers_of(geometry)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row and the schedule, in one launch."""
        slots, table = self._slots, batch.page_table
        cut = self._extent(batch)
        own = self._shape, cut.tile, cut.extent, cut.pieces
        tensors = batch.prefix_lens, table, slots, self._work, batch.q_indptr, batch.slots
        if slots.is_cuda:
            self._written((cut, table.stride(0), batch.slots is None), tensors, launch.write_metadata, *own)
            return
        record_call(launch.write_metadata, *own, *tensors, mutates=(slots, self._work))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows, one launch and a merge; q and out ``[rows, query heads, head_dim]``."""
        which, mask, depth = self._facts(batch)
        cache_layout, sinks = self._layer(cache)
        tensors = (
            q, cache.k, cache.v, cache.k_scale, cache.v_scale, sinks, out, batch.prefix_lens, batch.q_indptr,
            batch.page_table, mask, depth,
        )  # fmt: skip
        if self._slots.is_cuda:
            layout = which, cache_layout, q.stride(), out.stride(), q.dtype, out.dtype
            self._again(layout, tensors, self._launch_own, *which[:2])
            return
        check_rows(q, out)
        record_call(
            self._launch, *which[:2], *tensors, self._work, self._partial_out, self._partial_lse,
            mutates=(self._partial_out, self._partial_lse, out),
        )  # fmt: skip

    def _of_batch(self, batch: ForwardBatch) -> Facts:
        tail = batch.tail
        mask, depth = (tail.mask, tail.depth) if isinstance(tail, Tree) else (None, None)
        pitches = batch.page_table.stride(0), None if mask is None else mask.stride(0)
        return (self._extent(batch), isinstance(tail, Block), *pitches), mask, depth

    def _launch_own(self, cut: Cut, block: bool, *tensors: torch.Tensor) -> None:
        check_rows(tensors[0], tensors[MOVING.index("out")])
        own = self._work, self._partial_out, self._partial_lse
        self._launch(cut, block, *tensors, *own)  # type: ignore[call-arg]  # as MOVING names them

    def _launch(
        self,
        cut: Cut,
        block: bool,
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
        mask: torch.Tensor | None,
        depth: torch.Tensor | None,
        work: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
    ) -> None:
        a, device = self._geometry.attention, self._geometry.device
        beside = has_heads_beside(k, v)
        boxed = has_boxes(k, v, heads=cut.tile.heads if beside else 1)
        fast = boxed and boxes.has_fast_memory(k.device)
        tile = tiling.for_cache(a, device, cut.tile, has_one_pitch(k, v), boxed, beside, fast)
        launch.attend(
            self._shape, tile, cut.extent, cut.pieces, q, k, v, k_scale, v_scale, prefix_lens, page_table, mask, depth,
            work, partial_out, partial_lse, out, None, q_indptr, block, sinks,
        )  # fmt: skip

    def _extent(self, batch: ForwardBatch) -> Cut:
        """Worked out once for each size of batch: it is asked for in every layer."""
        ragged = batch.mode is Mode.RAGGED_VERIFY
        # What a graph freezes is the bound of every later replay, not this batch's.
        q_len = self._geometry.extent(batch.mode).q_len if ragged else batch.q_lens[0]
        size = (batch.padded_reqs, q_len, q_len if ragged else batch.tail_lens[0], batch.num_rows, ragged)
        found = self._cuts.get(size)
        if found is None:
            if len(self._cuts) >= MOST_KNOWN:
                self._cuts.clear()
            extent = Extent(*size)
            found = self._cuts[size] = Cut(extent, *self._cut(extent))
        return found

    def _cut(self, extent: Extent) -> tuple[tiling.Tile, int]:
        a, device = self._geometry.attention, self._geometry.device
        tile = tiling.choose(a, device, extent.q_len, num_reqs=extent.num_reqs)
        most = tiling.pieces(a, device, tile, extent.q_len, extent.num_reqs, self._geometry.max_kv_len)
        if not self._slots.is_cuda:
            return tiling.interpreted(a, tile, extent.q_len, most, self._geometry.max_kv_len)
        return tile, tiling.whole(most, extent.num_reqs)
