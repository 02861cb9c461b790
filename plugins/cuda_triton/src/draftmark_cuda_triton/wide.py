"""EXTEND over e4m3: K and V are widened once, before, where that is faster than in each row tile.

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

from . import launch, sizing, tiling
from .again import Again
from .extend import Extend, Source
from .launch import Attention
from .remembered import Layout, Remembered, kept_layout, layers_of, layout_of_cache

MOVING = ("k_source", "v_source", "prefix_lens", "q_indptr", "page_table")
"""The widening kernel's parameters that another layer or step brings, in the order of `Part.launch`."""


class Part:
    """So many KV heads, which are widened and attended to at a time.

    Attributes:
        heads: KV heads. k, v: ``[pages, WIDE_PAGE, heads, head_dim]``, of the buffers. extend: attention to them.
    """

    def __init__(
        self,
        geometry: Geometry,
        slots: torch.Tensor,
        row_tiles: torch.Tensor,
        buffers: Mapping[str, torch.Tensor],
        parts: int,
    ) -> None:
        a = geometry.attention
        own = tiling.widened(a, parts)
        self.heads, self._pages = own.num_kv_heads, buffers[sizing.WIDE_TABLE]
        pages = tiling.WIDE_PAGE, own.num_kv_heads, own.head_dim
        self.k, self.v = (buffers[name].view(-1, *pages) for name in (sizing.WIDE_K, sizing.WIDE_V))
        self.extend = Extend(replace(geometry, attention=own), slots, row_tiles, buffers, page_size=a.page_size)
        of_cache = replace(own, kv_dtype=a.kv_dtype, page_size=a.page_size)
        self._shape = Attention.of(replace(geometry, attention=of_cache), slots.is_cuda)
        self._again = Again(MOVING)
        self._layout = Remembered[KVCache, Layout](lambda cache: kept_layout(self.k, self.v, cache))

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
            layout = batch.padded_reqs, table.shape[1], batch.page_table.stride(0), layout_of_cache(cache)
            self._again(layout, tensors, self._launch, table.shape[1])
        else:
            record_call(self._launch, table.shape[1], *tensors, mutates=(self.k, self.v, self._pages))
        self.extend.attend_to(*self._widened(cache, sinks), table, q, batch, out)

    def get_ready(
        self,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        cache: KVCache,
        batch: ForwardBatch,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """All that `attend` launches, for no request and no row tile, so that it is compiled (`Extend.get_ready`)."""
        self._launch(1, cache.k, cache.v, batch.prefix_lens[:0], batch.q_indptr[:1], batch.page_table[:0])
        self.extend.get_ready(*self._widened(cache, sinks), table, q, batch, out)

    def _widened(self, cache: KVCache, sinks: torch.Tensor | None) -> tuple[Source, Layout]:
        """What is attended to, and its layout, as `Extend.attend_to` takes them."""
        return (self.k, self.v, cache.k_scale, cache.v_scale, sinks), self._layout(cache)

    def _launch(self, each: int, *tensors: torch.Tensor) -> None:
        launch.widen(self._shape, each, *tensors, self.k, self.v, self._pages)  # type: ignore[call-arg]  # as MOVING


@dataclass(frozen=True)
class Way:
    """How a batch is worked on whose K and V are widened.

    Attributes:
        table: its pages, int32 ``[R, pages each]``. part: the heads that there is room for at a time.
    """

    table: torch.Tensor
    part: Part


class Wide:
    """`Extend` of one geometry over e4m3: as it is, or over what has been widened. A step needs no more than the host's
    bound of its lengths; where the host has none, row tiles widen for themselves.

    Args:
        slots, row_tiles, buffers: see `Extend`; and among `buffers` those of `sizing.wide_buffers`, by name.
    """

    def __init__(
        self, geometry: Geometry, slots: torch.Tensor, row_tiles: torch.Tensor, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._geometry, self._given = geometry, (slots, row_tiles, buffers)
        self._narrow = Extend(geometry, slots, row_tiles, buffers)
        self._parts: dict[int, Part] = {}
        self._way = Remembered[ForwardBatch, Way | None](self._way_of)
        self._ready = set[Layout]()
        self._layer = layers_of(geometry)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """As `Extend` does, for the row tiles that will attend."""
        way = self._way(batch)
        (self._narrow if way is None else way.part.extend).write_metadata(batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows, as `Extend` launches it, or of each part of the heads once its K and V are widened."""
        way = self._way(batch)
        if way is None:
            self._narrow.attend(q, cache, batch, out)
            self._get_ready(q, cache, batch, out)
            return
        a, part, (_, sinks) = self._geometry.attention, way.part, self._layer(cache)
        if part.heads == a.num_kv_heads:
            part.attend(q, cache.k, cache.v, sinks, cache, batch, way.table, out)
            return
        for first in range(0, a.num_kv_heads, part.heads):
            of_kv = slice(first, first + part.heads)
            of_q = slice(of_kv.start * a.group_size, of_kv.stop * a.group_size)
            own = None if sinks is None else sinks[of_q]
            k, v = cache.k[:, :, of_kv], cache.v[:, :, of_kv]
            part.attend(q[:, of_q], k, v, own, cache, batch, way.table, out[:, of_q])

    def _get_ready(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compile what longer prompts over such a cache are launched with, with the first short one."""
        layout, sinks = self._layer(cache)
        if layout in self._ready or not q.is_cuda or torch.cuda.is_current_stream_capturing():
            return
        self._ready.add(layout)
        nothing = self._given[-1][sizing.WIDE_TABLE][:0].view(0, 1)
        self._part(1).get_ready(q, sinks, cache, batch, nothing, out)

    def _way_of(self, batch: ForwardBatch) -> Way | None:
        found = sizing.widening_of(self._geometry, batch)
        if found is None:
            return None
        cells = self._given[-1][sizing.WIDE_TABLE][: batch.padded_reqs * found.each]
        return Way(cells.view(batch.padded_reqs, found.each), self._part(found.parts))

    def _part(self, parts: int) -> Part:
        """The first of so many parts of the heads, and of the others."""
        if parts not in self._parts:
            self._parts[parts] = Part(self._geometry, *self._given, parts)
        return self._parts[parts]
