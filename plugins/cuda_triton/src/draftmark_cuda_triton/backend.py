"""The step path: four plain methods over the arena's buffers and the batch's own tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftmark import Geometry, Mode
from draftmark.arena import Arena
from draftmark.batch import ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.errors import BatchError
from draftmark.graphs import record_call

from . import launch, sizing, tiling
from .launch import Attention, Uniform

INTERPRETED_PIECES = 2
"""Pieces in the interpreter, where a program costs milliseconds whatever it does; two still cut and merge."""


class TritonBackend:
    """One code path for eager, capture and replay. Needs no host lengths and never reads the device on the host.

    Every launch goes through `record_call`, so that a recorded graph on the CPU replays it as one kernel.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        a, device = geometry.attention, geometry.device
        self.geometry = geometry
        self.arena = arena
        self._arena = {name: arena[name] for name in arena}
        self._shape = Attention(
            num_kv_heads=a.num_kv_heads,
            group=a.group_size,
            head_dim=a.head_dim,
            page_size=a.page_size,
            scale=a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5,
            cap=a.logits_soft_cap,
            window_left=a.window_left,
            # The geometry may describe a GPU while the tensors are on the CPU, interpreted.
            pdl=arena[sizing.SLOTS].is_cuda and device.arch >= 90,
        )
        self._extend_tile = tiling.choose(a, device, geometry.extent(Mode.EXTEND).q_len)

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing: the schedule is made on the device."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row and the schedule, in one launch."""
        slots = self._arena[sizing.SLOTS][: batch.num_rows]
        if batch.uniform is None:
            tiles = self._arena[sizing.ROW_TILES]
            record_call(
                launch.write_metadata_ragged, self._shape, self._extend_tile, batch.num_rows, batch.prefix_lens,
                batch.q_indptr, batch.page_table, slots, tiles, mutates=(slots, tiles),
            )  # fmt: skip
            return
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
            launch.write_kv, self._shape, k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots,
            mutates=(cache.k, cache.v),
        )  # fmt: skip

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows: one launch for a ragged batch, one and a merge for a uniform one."""
        if q.stride(-1) != 1 or out.stride(-1) != 1:
            raise BatchError("q and out must have head_dim contiguous; call contiguous() on them")
        if batch.uniform is None:
            record_call(
                launch.attend_extend, self._shape, self._for_cache(self._extend_tile, cache), batch.num_rows, q,
                cache.k, cache.v, cache.k_scale, cache.v_scale, batch.prefix_lens, batch.q_indptr, batch.page_table,
                self._arena[sizing.ROW_TILES], out, mutates=(out,),
            )  # fmt: skip
            return
        extent, tile, pieces = self._uniform(batch)
        mask, depth = (batch.tail.mask, batch.tail.depth) if isinstance(batch.tail, Tree) else (None, None)
        partial_out, partial_lse = self._arena[sizing.PARTIAL_OUT], self._arena[sizing.PARTIAL_LSE]
        record_call(
            launch.attend, self._shape, self._for_cache(tile, cache), extent, pieces, q, cache.k, cache.v,
            cache.k_scale, cache.v_scale, batch.prefix_lens, batch.page_table, mask, depth,
            self._arena[sizing.WORK], partial_out, partial_lse, out, mutates=(partial_out, partial_lse, out),
        )  # fmt: skip

    def _uniform(self, batch: ForwardBatch) -> tuple[Uniform, tiling.Tile, int]:
        q_len, tail_len = batch.q_lens[0], batch.tail_lens[0]
        a, device = self.geometry.attention, self.geometry.device
        tile = tiling.choose(a, device, q_len)
        pieces = tiling.pieces(a, device, tile, q_len, batch.padded_reqs, self.geometry.max_kv_len)
        if batch.device.type == "cpu":
            pieces = min(pieces, INTERPRETED_PIECES)
        return Uniform(batch.padded_reqs, q_len, tail_len), tile, pieces

    def _for_cache(self, tile: tiling.Tile, cache: KVCache) -> tiling.Tile:
        """The same tile, through the copy engine where a box can describe the cache."""
        boxes = tiling.uses_tma(self.geometry.attention, self.geometry.device, tile)
        return replace(tile, tma=boxes and cache.k.is_contiguous() and cache.v.is_contiguous())
