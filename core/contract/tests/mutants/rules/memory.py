"""Mutants that the checks of `memory` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from draftmark import Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree

from ..designs.layouts import of_tutorial
from ..designs.tutorial import Backend
from ..designs.tutorial_parts import TutorialParts, opens
from ..designs.tutorial_plans import Planned, plugin
from ..mutant import Mutant, on_batch


class Compiled:
    """A compiled kernel with a compile-time window."""

    def __init__(self, window: int) -> None:
        self.window = window


_COMPILED: WeakValueDictionary[tuple[object, ...], Compiled] = WeakValueDictionary()


class KernelCache(TutorialParts):
    """Caches compiled kernels by a key without the window, so a second layer group uses the window of the first."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        a = geometry.attention
        key = a.num_qo_heads, a.num_kv_heads, a.head_dim, a.page_size, a.q_dtype
        self.kernel = _COMPILED.get(key) or Compiled(a.window_left)
        _COMPILED[key] = self.kernel
        self.window = self.kernel.window


_SCALES: dict[tuple[int, ...], float | None] = {}
_WORDS: dict[tuple[int, ...], int] = {}


def _scale_by_heads(backend: Any) -> None:
    """Use the softmax scale of the first geometry with this head shape, from a module-level cache."""
    a = backend.geometry.attention
    scale = _SCALES.setdefault((a.num_qo_heads, a.num_kv_heads, a.head_dim), a.softmax_scale)
    backend.geometry = replace(backend.geometry, attention=replace(a, softmax_scale=scale))


def _words_by_heads(backend: Any) -> None:
    """Use the number of mask words of the first geometry with this head shape, from a module-level cache."""
    a = backend.geometry.attention
    key, own_words = (a.num_qo_heads, a.num_kv_heads, a.head_dim), int(backend.geometry.mask_words)

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        words = _WORDS.setdefault(key, own_words)
        if not isinstance(batch.tail, Tree) or words == own_words:
            return batch
        flat, rows = batch.tail.mask.reshape(-1), torch.arange(batch.num_rows)[:, None]
        index = (rows * words + torch.arange(own_words)).clamp(max=flat.shape[0] - 1)
        return replace(batch, tail=Tree(flat[index], batch.tail.depth))

    on_batch(change)(backend)


SHARED: dict[torch.device, torch.Tensor] = {}


class SharedWorkspace(Planned):
    """Shares one workspace between all backends on a device, so the draft's plan overwrites the target's."""

    def own_bounds(self, geometry: Geometry, arena: Arena) -> torch.Tensor:
        device = arena["slots"].device
        if device not in SHARED or len(SHARED[device]) < geometry.max_reqs:
            SHARED[device] = torch.zeros(max(4096, geometry.max_reqs), dtype=torch.int32, device=device)
        return SHARED[device]


WIDTHS: dict[tuple[object, int], int] = {}


class WidthByContext(Backend):
    """Caches the KV width by (attention, max_context_len), although longer drafts or overlap need more width."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.width = WIDTHS.setdefault((geometry.attention, geometry.limits.max_context_len), self.width)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        table = batch.page_table[:, : self.width // self.shape.page_size]
        self.width = table.shape[1] * self.shape.page_size
        super().attend(q, cache, replace(batch, page_table=table), out)

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        kept, self.width = self.width, self.width + tail_len  # a tail may end beyond width; [:, :kept] drops those keys
        try:
            return super()._visible(batch, request, rows, prefix, tail_len)[:, :kept]
        finally:
            self.width = kept


MUTANTS = (
    Mutant("R25", "Caches the softmax scale in a global by head shape", "flashinfer#4014", patch=_scale_by_heads),
    Mutant("R26", "Caches the number of mask words in a global by head shape",
           "flashinfer#4014", patch=_words_by_heads),
    of_tutorial(
        "S17",
        "Omits the window from the key of the kernel cache",
        "two layer groups in one engine (full and sliding); each is right in its own process",
        opens(KernelCache),
    ),
    of_tutorial(
        "S33",
        "Stores planned lengths in one workspace that all backends of the process share",
        "FlashInfer wrappers on one workspace: plan(target), plan(draft), run(target)",
        plugin(SharedWorkspace),
    ),
    of_tutorial(
        "S48",
        "Caches the KV width by attention and context limit, without the draft tokens",
        "lru_cache with an incomplete key; the second of two geometries, at the context limit",
        plugin(WidthByContext),
    ),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("R25", "R26", "S17", "S48"), "memory.of_geometries_that_differ_is_apart"),
    "S33": "memory.of_two_plans_is_apart",
}
