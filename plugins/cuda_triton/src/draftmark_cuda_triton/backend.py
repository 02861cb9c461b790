"""The step path: four plain methods over the arena's buffers and the batch's own tensors."""

from __future__ import annotations

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree, record_call

from . import launch, sizing, tiling
from .extend import Extend, cache_is_contiguous, check_rows
from .launch import Attention, Uniform

INTERPRETED_PIECES = 2
"""Pieces in the interpreter, where a program costs milliseconds whatever it does; two still cut and merge."""


class TritonBackend:
    """One code path for eager, capture and replay. Needs no host lengths and never reads the device on the host.

    Every launch goes through `record_call`, so that a recorded graph on the CPU replays it as one kernel.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._arena = {name: arena[name] for name in arena}
        slots = self._arena[sizing.SLOTS]
        self._shape = Attention.of(geometry, slots.is_cuda)
        if Mode.EXTEND in geometry.modes:
            self._extend = Extend(geometry, slots, self._arena[sizing.ROW_TILES])

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing: the schedule is made on the device."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row and the schedule, in one launch."""
        if batch.uniform is None:
            self._extend.write_metadata(batch)
            return
        slots = self._arena[sizing.SLOTS][: batch.num_rows]
        extent, tile, pieces = self._uniform(batch)
        work = self._arena[sizing.WORK]
        record_call(
            launch.write_metadata, self._shape, tile, extent, pieces, batch.prefix_lens, batch.page_table, slots, work,
            mutates=(slots, work),
        )  # fmt: skip

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Scatter the rows to their slots, K and V in one launch, quantised where the cache is."""
        slots = self._arena[sizing.SLOTS][: batch.num_rows]
        record_call(
            launch.write_kv, k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots, mutates=(cache.k, cache.v)
        )

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows: one launch for a ragged batch, one and a merge for a uniform one."""
        if batch.uniform is None:
            self._extend.attend(q, cache, batch, out)
            return
        check_rows(q, out)
        extent, tile, pieces = self._uniform(batch)
        tile = tiling.for_cache(self.geometry.attention, self.geometry.device, tile, cache_is_contiguous(cache))
        mask, depth = (batch.tail.mask, batch.tail.depth) if isinstance(batch.tail, Tree) else (None, None)
        partial_out, partial_lse = self._arena[sizing.PARTIAL_OUT], self._arena[sizing.PARTIAL_LSE]
        record_call(
            launch.attend, self._shape, tile, extent, pieces, q, cache.k, cache.v,
            cache.k_scale, cache.v_scale, batch.prefix_lens, batch.page_table, mask, depth,
            self._arena[sizing.WORK], partial_out, partial_lse, out, mutates=(partial_out, partial_lse, out),
        )  # fmt: skip

    def _uniform(self, batch: ForwardBatch) -> tuple[Uniform, tiling.Tile, int]:
        q_len, tail_len = batch.q_lens[0], batch.tail_lens[0]
        a, device = self.geometry.attention, self.geometry.device
        tile = tiling.choose(a, device, q_len)
        pieces = tiling.pieces(a, device, tile, q_len, batch.padded_reqs, self.geometry.max_kv_len)
        if batch.device.type == "cpu":
            tile, pieces = tiling.interpreted(a, tile, q_len), min(pieces, INTERPRETED_PIECES)
        return Uniform(batch.padded_reqs, q_len, tail_len), tile, pieces
