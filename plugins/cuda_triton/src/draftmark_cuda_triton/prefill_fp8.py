"""Prefill (EXTEND) over e4m3: K and V are upcast once before attention where that is faster than in each row tile.

A row tile that widens keys for itself takes two thirds longer, and a prompt has hundreds of them. What is widened
stands in pages of its own, request after request, and the kernels for rows of 16 bits attend to it. Where not all heads
have room, some are widened and attended to, then others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import sizing
from .heuristics import upcast
from .launch import launches
from .launch.layouts import IdentityCache, Layout, cached_layout, interned_layout, layer_facts
from .launch.operands import AttentionParams
from .launch.relaunch import RelaunchCache
from .prefill import KvOperands, Prefill

PER_CALL = ("k_source", "v_source", "prefix_lens", "q_indptr", "page_table")
"""The widening kernel's parameters that another layer or step brings, in the order of `UpcastHeads.launch`."""


class UpcastHeads:
    """So many KV heads, which are widened and attended to at a time.

    Attributes:
        heads: KV heads. k, v: ``[pages, UPCAST_PAGE_SIZE, heads, head_dim]``, of the buffers. prefill: attention to
            them.
    """

    def __init__(
        self,
        geometry: Geometry,
        slots: torch.Tensor,
        row_tiles: torch.Tensor,
        buffers: Mapping[str, torch.Tensor],
        head_groups: int,
    ) -> None:
        a = geometry.attention
        own = upcast.upcast_shape(a, head_groups)
        self.heads, self._table = own.num_kv_heads, buffers[sizing.UPCAST_TABLE]
        pages = upcast.UPCAST_PAGE_SIZE, own.num_kv_heads, own.head_dim
        self.k, self.v = (buffers[name].view(-1, *pages) for name in (sizing.UPCAST_K, sizing.UPCAST_V))
        self.prefill = Prefill(replace(geometry, attention=own), slots, row_tiles, buffers, page_size=a.page_size)
        cache_shape = replace(own, kv_dtype=a.kv_dtype, page_size=a.page_size)
        self._shape = AttentionParams.from_geometry(replace(geometry, attention=cache_shape), slots.is_cuda)
        self._relaunch = RelaunchCache(PER_CALL)
        self._layout = IdentityCache[KVCache, Layout](lambda cache: interned_layout(self.k, self.v, cache))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        cache: KVCache,
        batch: ForwardBatch,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Widen, and attend.

        Args:
            q, k, v, sinks, out: of these heads. cache: theirs, for all else. table: int32 ``[R, pages each]``, out.
        """
        tensors = (k, v, batch.prefix_lens, batch.q_indptr, batch.page_table)
        if k.is_cuda:
            layout = batch.padded_reqs, table.shape[1], batch.page_table.stride(0), cached_layout(cache)
            self._relaunch(layout, tensors, self._launch, table.shape[1])
        else:
            record_call(self._launch, table.shape[1], *tensors, mutates=(self.k, self.v, self._table))
        self.prefill.attend_pages(*self._upcast_operands(cache, sinks), table, q, batch, out)

    def warm_up(
        self,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        cache: KVCache,
        batch: ForwardBatch,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """All that `attend_decode_verify` launches, for no request and no row tile, so that it is compiled
        (`Prefill.warm_up`).
        """
        self._launch(1, cache.k, cache.v, batch.prefix_lens[:0], batch.q_indptr[:1], batch.page_table[:0])
        self.prefill.warm_up(*self._upcast_operands(cache, sinks), table, q, batch, out)

    def _upcast_operands(self, cache: KVCache, sinks: torch.Tensor | None) -> tuple[KvOperands, Layout]:
        """What is attended to, and its layout, as `Prefill.attend_pages` takes them."""
        return (self.k, self.v, cache.k_scale, cache.v_scale, sinks), self._layout(cache)

    def _launch(self, pages_per_request: int, *tensors: torch.Tensor) -> None:
        launches.upcast_kv(self._shape, pages_per_request, *tensors, self.k, self.v, self._table)  # type: ignore[call-arg]  # as PER_CALL


@dataclass(frozen=True)
class UpcastPlan:
    """How a batch is worked on whose K and V are widened.

    Attributes:
        table: its pages, int32 ``[R, pages each]``. group: the heads that there is room for at a time.
    """

    table: torch.Tensor
    group: UpcastHeads


class PrefillFp8:
    """`Prefill` of one geometry over e4m3: as it is, or over what has been widened. A step needs no more than the
    host's bound of its lengths; where the host has none, row tiles widen for themselves.

    Args:
        slots, row_tiles, buffers: see `Prefill`; and among `buffers` those of `sizing.upcast_buffers`, by name.
    """

    def __init__(
        self, geometry: Geometry, slots: torch.Tensor, row_tiles: torch.Tensor, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._geometry, self._prefill_args = geometry, (slots, row_tiles, buffers)
        self._unconverted = Prefill(geometry, slots, row_tiles, buffers)
        self._head_groups: dict[int, UpcastHeads] = {}
        self._plan = IdentityCache[ForwardBatch, UpcastPlan | None](self._plan_upcast)
        self._warmed_up = set[Layout]()
        self._layer_facts = layer_facts(geometry)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """As `Prefill` does, for the row tiles that will attend."""
        plan = self._plan(batch)
        (self._unconverted if plan is None else plan.group.prefill).write_metadata(batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows, as `Prefill` launches it, or of each group of heads once its K and V are upcast."""
        plan = self._plan(batch)
        if plan is None:
            self._unconverted.attend(q, cache, batch, out)
            self._warm_up(q, cache, batch, out)
            return
        a, group, (_, sinks) = self._geometry.attention, plan.group, self._layer_facts(cache)
        if group.heads == a.num_kv_heads:
            group.attend(q, cache.k, cache.v, sinks, cache, batch, plan.table, out)
            return
        for first in range(0, a.num_kv_heads, group.heads):
            kv_heads = slice(first, first + group.heads)
            q_heads = slice(kv_heads.start * a.group_size, kv_heads.stop * a.group_size)
            own = None if sinks is None else sinks[q_heads]
            k, v = cache.k[:, :, kv_heads], cache.v[:, :, kv_heads]
            group.attend(q[:, q_heads], k, v, own, cache, batch, plan.table, out[:, q_heads])

    def _warm_up(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compile what longer prompts over such a cache are launched with, with the first short one."""
        layout, sinks = self._layer_facts(cache)
        if layout in self._warmed_up or not q.is_cuda or torch.cuda.is_current_stream_capturing():
            return
        self._warmed_up.add(layout)
        empty_table = self._prefill_args[-1][sizing.UPCAST_TABLE][:0].view(0, 1)
        self._head_group(1).warm_up(q, sinks, cache, batch, empty_table, out)

    def _plan_upcast(self, batch: ForwardBatch) -> UpcastPlan | None:
        found = sizing.plan_upcast(self._geometry, batch)
        if found is None:
            return None
        cells = self._prefill_args[-1][sizing.UPCAST_TABLE][: batch.padded_reqs * found.pages_per_request]
        return UpcastPlan(cells.view(batch.padded_reqs, found.pages_per_request), self._head_group(found.head_groups))

    def _head_group(self, head_groups: int) -> UpcastHeads:
        """The first of so many parts of the heads, and of the others."""
        if head_groups not in self._head_groups:
            self._head_groups[head_groups] = UpcastHeads(self._geometry, *self._prefill_args, head_groups)
        return self._head_groups[head_groups]
