"""Prefill (EXTEND) over e4m3: K and V are upcast once before attention where that is faster than in each row tile.

A row tile that upcasts its keys itself takes two thirds longer, and a prompt has hundreds of row tiles. Upcast K and V
are stored in their own pages, one request after another, and the 16-bit kernels attend to them. If not all KV heads fit
into the buffers, groups of heads are upcast and attended to in sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import sizing
from .heuristics import upcast
from .launch.layouts import IdentityCache, Layout, Layouts, layer_facts
from .launch.operands import AttentionParams
from .launch.relaunch import RelaunchCache
from .launch.upcast import upcast_kv
from .prefill import KvOperands, Prefill

PER_CALL = ("k_source", "v_source", "prefix_lens", "q_indptr", "page_table")
"""Parameters of the upcast kernel that change per layer or step, in the order of `UpcastHeads.launch`."""


class UpcastHeads:
    """Upcasts K and V of one group of KV heads at a time, and runs attention over the result.

    Attributes:
        heads: KV heads of a group.
        k, v: views of the buffers, ``[pages, UPCAST_PAGE_SIZE, heads, head_dim]``, in q's dtype.
        prefill: attention over the upcast K and V.
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
        self._all_heads = a.num_kv_heads
        pages = upcast.UPCAST_PAGE_SIZE, own.num_kv_heads, own.head_dim
        self.k, self.v = (buffers[name].view(-1, *pages) for name in (sizing.UPCAST_K, sizing.UPCAST_V))
        self.prefill = Prefill(replace(geometry, attention=own), slots, row_tiles, buffers, page_size=a.page_size)
        cache_shape = replace(own, kv_dtype=a.kv_dtype, page_size=a.page_size)
        self._shape = AttentionParams.from_geometry(replace(geometry, attention=cache_shape), slots.is_cuda)
        self._relaunch = RelaunchCache(PER_CALL)
        layouts = Layouts()
        self._layout = IdentityCache[KVCache, Layout](lambda cache: layouts.of(self.k, self.v, cache))
        self._e4m3_layout = IdentityCache[KVCache, Layout](lambda cache: layouts.of(cache.k, cache.v, cache))

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
        lse: torch.Tensor | None,
    ) -> None:
        """Upcast K and V of these heads, then run attention.

        Args:
            q, k, v, sinks, out, lse: slices of this group of heads. k and v are e4m3.
            cache: the cache of all heads, for scales and layout.
            table: int32 ``[R, pages each]``, output: page table of the upcast K and V.
        """
        tensors = (k, v, batch.prefix_lens, batch.q_indptr, batch.page_table)
        if k.is_cuda:
            layout = batch.padded_reqs, table.shape[1], batch.page_table.stride(0), self._e4m3_layout(cache)
            self._relaunch(layout, tensors, self.launch, table.shape[1])
        else:
            record_call(self.launch, table.shape[1], *tensors, mutates=(self.k, self.v, self._table))
        self.prefill.attend_pages(*self._upcast_operands(cache, sinks), table, q, batch, out, lse)

    def warm_up(
        self,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        cache: KVCache,
        batch: ForwardBatch,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compile the kernels of `attend` by launches without requests and row tiles; see `Prefill.warm_up`."""
        self.launch(1, cache.k, cache.v, batch.prefix_lens[:0], batch.q_indptr[:1], batch.page_table[:0])
        self.prefill.warm_up(*self._upcast_operands(cache, sinks), table, q, batch, out)

    def _upcast_operands(self, cache: KVCache, sinks: torch.Tensor | None) -> tuple[KvOperands, Layout]:
        """Return the upcast K and V with scales and sinks, and their layout, as `Prefill.attend_pages` takes them."""
        return (self.k, self.v, cache.k_scale, cache.v_scale, sinks), self._layout(cache)

    def launch(self, pages_per_request: int, *tensors: torch.Tensor) -> None:
        """Launch the upcast of the tensors in PER_CALL into this group's buffers."""
        upcast_kv(self._shape, self._all_heads, pages_per_request, *tensors, self.k, self.v, self._table)  # type: ignore[call-arg]  # as PER_CALL


@dataclass(frozen=True)
class UpcastPlan:
    """Holds the page table and the head groups of a batch with upcast K and V.

    Attributes:
        table: page table of the upcast K and V, int32 ``[R, pages each]``.
        group: upcasts one group of KV heads into the buffers and runs attention over the result.
    """

    table: torch.Tensor
    group: UpcastHeads


class PrefillFp8:
    """Runs prefill for one geometry over an e4m3 cache, either directly or over upcast K and V.

    Upcasting beforehand needs the host's upper bounds of the lengths. Without bounds each row tile upcasts its own
    keys.

    Args:
        slots, row_tiles: see `Prefill`.
        buffers: by name, the buffers of `Prefill` and of `sizing.upcast_buffers`.
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
        """Write KV slots and row tiles (`Prefill.write_metadata`) for the page size and heads that `attend` uses."""
        plan = self._plan(batch)
        (self._unconverted if plan is None else plan.group.prefill).write_metadata(batch)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Run attention for all rows: directly over e4m3, or for each group of heads after upcasting its K and V."""
        plan = self._plan(batch)
        if plan is None:
            self._unconverted.attend(q, cache, batch, out, lse)
            self._warm_up(q, cache, batch, out)
            return
        a, group, sinks = self._geometry.attention, plan.group, self._layer_facts(cache).sinks
        if group.heads == a.num_kv_heads:
            group.attend(q, cache.k, cache.v, sinks, cache, batch, plan.table, out, lse)
            return
        for first in range(0, a.num_kv_heads, group.heads):
            kv_heads = slice(first, first + group.heads)
            q_heads = slice(kv_heads.start * a.group_size, kv_heads.stop * a.group_size)
            own = None if sinks is None else sinks[q_heads]
            k, v = cache.k[:, :, kv_heads], cache.v[:, :, kv_heads]
            own_lse = None if lse is None else lse[:, q_heads]
            group.attend(q[:, q_heads], k, v, own, cache, batch, plan.table, out[:, q_heads], own_lse)

    def _warm_up(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compile the upcast kernels during the first short prompt, so that a long prompt does not wait for them."""
        layout, _, _, sinks = self._layer_facts(cache)
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
        """Return the `UpcastHeads` of one of `head_groups` equal groups of KV heads, created in the first call."""
        if head_groups not in self._head_groups:
            self._head_groups[head_groups] = UpcastHeads(self._geometry, *self._prefill_args, head_groups)
        return self._head_groups[head_groups]
