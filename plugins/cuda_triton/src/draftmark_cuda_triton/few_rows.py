"""Few rows a request: every mode but EXTEND, from the batch's own lengths and page table. No plan, no host lengths."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Block, ForwardBatch, KVCache, Tree, record_call, sinks_of

from . import launch, sizing, tiling
from .extend import cache_has_boxes, check_rows, has_one_pitch
from .launch import Attention, Extent


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
        self._cuts: dict[Extent, tuple[tiling.Tile, int]] = {}

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row and the schedule, in one launch."""
        slots = self._slots[: batch.num_rows]
        extent, tile, pieces = self._extent(batch)
        record_call(
            launch.write_metadata, self._shape, tile, extent, pieces, batch.prefix_lens, batch.page_table, slots,
            self._work, batch.q_indptr, batch.slots, mutates=(slots, self._work),
        )  # fmt: skip

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows, one launch and a merge; q and out ``[rows, query heads, head_dim]``."""
        check_rows(q, out)
        extent, tile, pieces = self._extent(batch)
        a, device = self._geometry.attention, self._geometry.device
        tile = tiling.for_cache(a, device, tile, has_one_pitch(cache), cache_has_boxes(cache))
        mask, depth = (batch.tail.mask, batch.tail.depth) if isinstance(batch.tail, Tree) else (None, None)
        partial_out, partial_lse = self._partial_out, self._partial_lse
        record_call(
            launch.attend, self._shape, tile, extent, pieces, q, cache.k, cache.v,
            cache.k_scale, cache.v_scale, batch.prefix_lens, batch.page_table, mask, depth,
            self._work, partial_out, partial_lse, out, None, batch.q_indptr, isinstance(batch.tail, Block),
            sinks_of(cache, self._geometry), mutates=(partial_out, partial_lse, out),
        )  # fmt: skip

    def _extent(self, batch: ForwardBatch) -> tuple[Extent, tiling.Tile, int]:
        """Worked out once for each size of batch: it is asked for in every layer."""
        ragged = batch.mode is Mode.RAGGED_VERIFY
        # What a graph freezes is the bound of every later replay, not this batch's.
        q_len = self._geometry.extent(batch.mode).q_len if ragged else batch.q_lens[0]
        extent = Extent(batch.padded_reqs, q_len, q_len if ragged else batch.tail_lens[0], batch.num_rows, ragged)
        if extent not in self._cuts:
            self._cuts[extent] = self._cut(extent)
        return extent, *self._cuts[extent]

    def _cut(self, extent: Extent) -> tuple[tiling.Tile, int]:
        a, device = self._geometry.attention, self._geometry.device
        tile = tiling.choose(a, device, extent.q_len)
        most = tiling.pieces(a, device, tile, extent.q_len, extent.num_reqs, self._geometry.max_kv_len)
        if not self._slots.is_cuda:
            return tiling.interpreted(a, tile, extent.q_len, most, self._geometry.max_kv_len)
        return tile, tiling.whole(most, extent.num_reqs)
