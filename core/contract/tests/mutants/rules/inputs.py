"""Mutants that the checks of `inputs` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import BufferSpec, Geometry, Mode, ceil_div
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree

from ..designs.layouts import of_tutorial
from ..designs.tutorial import Backend, Plugin
from ..designs.tutorial_parts import opens
from ..designs.tutorial_plans import Planned, plugin, schedule, schedule_usage
from ..mutant import Mutant, around


class DenseValues(Backend):
    """Reads v as contiguous. v is often a view of fused QKV rows, while RoPE makes k contiguous."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        heads, dim = v.shape[1:]
        super().write_kv(k, v.as_strided(v.shape, (heads * dim, dim, 1), v.storage_offset()), cache, batch)


class RowsOfEight(Backend):
    """Stores eight rows per block without predication: surplus rows use slots that a larger batch left."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        rows = batch.num_rows
        slots = self.slots[: ceil_div(rows, 8) * 8]
        row = torch.arange(len(slots), device=k.device).clamp(max=rows - 1)
        for new, pages in ((k, cache.k), (v, cache.v)):
            pages.flatten(0, 1).index_copy_(0, slots[rows:], new[row[rows:]])
            pages.flatten(0, 1).index_copy_(0, slots[:rows], new)


class ZeroedSlots(Plugin):
    """Zeroes the slots once at the start, so surplus rows go to the null page only until a batch shrinks."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        rows = ceil_div(geometry.max_rows_any, 8) * 8
        formula = "max_rows_any, rounded up to 8"
        return [BufferSpec("slots", (rows,), "int64", formula, zeros=True)]


def _strides_of_k(original: Any, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
    reach = (len(v) - 1) * k.stride(0) + v.shape[1] * v.shape[2] + v.storage_offset()
    if reach <= v.untyped_storage().nbytes() // v.element_size():
        v = torch.as_strided(v, v.shape, k.stride(), v.storage_offset())
    original(k, v, cache, batch)


class InferenceScratch(Planned):
    """Allocates host scratch in the first plan. If that plan ran in inference mode, later plans cannot write it."""

    scratch: torch.Tensor | None = None

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.size = geometry.max_reqs

    def send(self, lens: tuple[int, ...]) -> None:
        if self.scratch is None:
            self.scratch = torch.zeros(self.size, dtype=torch.int32)
        self.scratch[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        self.bounds[: len(lens)].copy_(self.scratch[: len(lens)])


class StaticViews(Backend):
    """Keeps the tensors of the first batch of each (mode, step, size), though engines may alternate two buffers."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.views: dict[tuple[Mode, int, int], ForwardBatch] = {}

    def _static(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.mode is Mode.EXTEND:
            return batch
        first = self.views.setdefault((batch.mode, batch.step, batch.padded_reqs), batch)
        return replace(batch, prefix_lens=first.prefix_lens, page_table=first.page_table)

    def write_metadata(self, batch: ForwardBatch) -> None:
        super().write_metadata(self._static(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, self._static(batch), out)


class FirstLayerByAddress(Backend):
    """Computes masks in layer 0 for all layers, and recognises layer 0 by the first KV cache address ever seen.

    Engines profile memory with a small KV pool and allocate the real one afterwards, so the address changes.
    """

    layer0: int | None = None

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.masks: dict[tuple[object, ...], torch.Tensor] = {}

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.layer0 = cache.k.data_ptr() if self.layer0 is None else self.layer0
        self.first = cache.k.data_ptr() == self.layer0
        super().attend(q, cache, batch, out)

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        key = (batch.mode, batch.step, request, rows.stop - rows.start)
        if self.first or key not in self.masks:
            self.masks[key] = super()._visible(batch, request, rows, prefix, tail_len)
        return self.masks[key]


class SubBatches(Backend):
    """Splits eager batches that are larger than any graph, but does not slice the tree's `depth` for each part."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.part = max(geometry.limits.capture_batch_sizes, default=geometry.max_reqs)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if not batch.uniform or batch.padded_reqs <= self.part:
            super().attend(q, cache, batch, out)
            return
        n = batch.q_lens[0]
        for first in range(0, batch.padded_reqs, self.part):
            some = slice(first, min(first + self.part, batch.padded_reqs))
            rows, tail = slice(some.start * n, some.stop * n), batch.tail
            part = replace(
                batch,
                prefix_lens=batch.prefix_lens[some],
                page_table=batch.page_table[some],
                q_lens=batch.q_lens[some],
                tail_lens=batch.tail_lens[some],
                tail=Tree(tail.mask[rows], tail.depth) if isinstance(tail, Tree) else tail,
            )
            super().attend(q[rows], cache, part, out[rows])


MUTANTS = (
    of_tutorial(
        "S19",
        "Reads v as contiguous",
        "v is a view of the fused QKV projection, while RoPE makes k and q contiguous",
        opens(DenseValues),
    ),
    of_tutorial(
        "S20",
        "Stores rows in groups of eight, with surplus rows in slots of an earlier batch",
        "a batch that shrinks: the last row's KV overwrites a token of another request",
        opens(RowsOfEight, ZeroedSlots),
    ),
    of_tutorial(
        "S41",
        "Keeps lengths and page tables of the first batch of a size, though engines alternate buffers",
        "persistent views of an engine's buffers; overlap schedulers fill two sets in turn",
        plugin(StaticViews),
    ),
    of_tutorial(
        "S43",
        "Recomputes masks only for the address of the first KV cache ever seen",
        "memory profiling or sleep mode replaces the pool, and the masks are never computed again",
        plugin(FirstLayerByAddress),
    ),
    of_tutorial(
        "S44",
        "Splits batches larger than any graph, but not the depths of their trees",
        "micro-batches of eager steps; needs a window, trees and more requests than the largest graph",
        plugin(SubBatches),
    ),
    of_tutorial(
        "S49",
        "Allocates scratch in the first plan, as an inference tensor if that is a warm-up",
        "Inplace update to inference tensor outside InferenceMode: training loops that also generate",
        plugin(InferenceScratch, schedule),
        schedule_usage,
    ),
    Mutant("T05", "Reads v with the row stride of k", "RoPE makes k contiguous, v stays a view of the projection",
           patch=lambda b: around(b, "write_kv", _strides_of_k)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("S19", "S20", "S44", "T05"), "inputs.may_be_views_of_one_projection"),
    **dict.fromkeys(("S41", "S43"), "inputs.may_lie_elsewhere_each_time"),
    "S49": "inputs.may_come_in_any_grad_mode",
}
