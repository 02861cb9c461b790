"""Mutants that checks of `chosen` kill: steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import BufferSpec, Form, Geometry
from draftmark.runtime import Chosen, ForwardBatch, KVCache

from ...designs.chosen_designs import Entries, ListFlash, ListSplit, chosen_mutant, on_lists
from ...designs.layouts import on_reference
from ...mutant import around, shaped


class LiveRowsOnly(ListFlash):
    """Leaves the rows of padded requests as they are."""

    def num_rows(self, batch: ForwardBatch) -> int:
        return sum(batch.q_lens[: batch.num_reqs])


class SixteenRows(ListSplit):
    """Computes at most 16 rows."""

    def num_rows(self, batch: ForwardBatch) -> int:
        return min(16, batch.num_rows)


def _stale_lists_of_padding(backend: Any) -> None:
    """Read the lists of padding rows after the last request."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        if backend.geometry.attention.chosen_width:
            indptr = batch.q_indptr.clone()
            indptr[-1] = batch.num_rows
            batch = replace(batch, q_indptr=indptr)
        original(q, cache, batch, out, *lse)

    around(backend, "attend", call)


def _packed_pages(backend: Any) -> None:
    """Read the listed rows of strided pages as if the pages were packed."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        if backend.geometry.attention.chosen_width and Form.STRIDED_KV in backend.geometry.forms:
            rows = cache.k[:, :, 0]
            packed = rows.as_strided(rows.shape, torch.empty(rows.shape, device="meta").stride(), rows.storage_offset())
            cache = KVCache.latent(packed, value_dim=cache.v.shape[-1])
        original(q, cache, batch, out, *lse)

    around(backend, "attend", call)


class PagesOfTheTable(ListFlash):
    """Takes slot // page_size for a column of the page table."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        size = self.shape.page_size
        page = batch.page_table.flatten()[(slots // size).clamp(0, batch.page_table.numel() - 1).long()]
        return torch.where(slots >= 0, page * size + slots % size, slots), count


class StoresAnyway(ListSplit):
    """Writes zeros to the rows' slots although the engine has stored KV."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        if Form.ENGINE_STORES in self.geometry.forms:
            cache.parts[0].flatten(0, 1).index_fill_(0, self.slots[: batch.num_rows].clamp(min=0), 0.0)
        super().attend(q, cache, batch, out, lse)


def _lists_of_the_capture(backend: Any) -> None:
    """Read the lists that the first plan of a batch size copied to memory of the backend."""
    kept: dict[int, Chosen] = {}

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        if batch.chosen is not None:
            kept.setdefault(batch.num_rows, Chosen(batch.chosen.slots.clone(), batch.chosen.counts.clone()))

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        original(q, cache, replace(batch, chosen=kept.get(batch.num_rows, batch.chosen)), out, *lse)

    around(backend, "plan", plan)
    around(backend, "attend", attend)


class RowsOfTheCapture(ListFlash):
    """Computes the live rows of the batch that was captured."""

    def num_rows(self, batch: ForwardBatch) -> int:
        return max(1, sum(batch.q_lens[: batch.num_reqs]))


class CountsOnTheHost(ListSplit):
    """Reads the counts on the host, so that a graph keeps those of its capture."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, torch.tensor(int(count), device=slots.device)


class ListsByRows(ListFlash):
    """Keeps the lists of the first eager forward of a mode and a number of rows."""

    def __init__(self, geometry: Geometry, arena: Any) -> None:
        super().__init__(geometry, arena)
        self.kept: dict[Any, Chosen] = {}

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        assert batch.chosen is not None
        now = Chosen(batch.chosen.slots.clone(), batch.chosen.counts.clone())
        kept = self.kept.setdefault((batch.mode, batch.num_rows), now)
        return kept.slots[row], kept.counts[row]


class AfterAFailure(ListSplit):
    """Reads one entry of each list in the forward after one that failed between plan and attend."""

    planned = failed = False

    def plan(self, batch: ForwardBatch) -> None:
        self.failed, self.planned = self.planned, True
        super().plan(batch)

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        super().attend(q, cache, batch, out, lse)
        self.planned = False

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, count.clamp(max=1) if self.failed else count


def _largest_counts_so_far(backend: Any) -> None:
    """Read a row's list up to the largest count of its earlier lists, where the entries are slots."""
    a = backend.geometry.attention
    most = torch.zeros(backend.geometry.max_rows_any, dtype=torch.int32)

    def change(batch: ForwardBatch, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        seen = most[: len(counts)]
        live = torch.where(torch.arange(len(counts)) < batch.q_indptr[-1], counts, 0)
        torch.maximum(seen, live, out=seen)
        used = slots <= batch.page_table.max() * a.page_size
        return torch.where(used, slots, -1), torch.maximum(live, seen)

    if a.chosen_width:
        on_lists(change)(backend)


def _with_lists(shape: Callable[[Geometry], tuple[int, ...]], name: str = "chosen_slots") -> dict[str, Any]:
    """Return a hook that adds a buffer for a copy of the lists."""

    def buffers(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        own = BufferSpec(name, shape(geometry), "int32", "rows × chosen_width")
        return [*specs, own] if geometry.attention.chosen_width else specs

    return {"buffers": buffers}


def _refuses(when: Callable[[Geometry], bool], reason: str) -> dict[str, Any]:
    return {"supports": lambda geometry, reasons: [*reasons, *[reason] * when(geometry)]}


def _without(**fields: Any) -> Callable[[Any], None]:
    """Return a patch that drops a field of the attention shape of layers with lists."""
    return lambda backend: shaped(**fields)(backend) if backend.geometry.attention.chosen_width else None


def _no_sinks(backend: Any) -> None:
    """Leave the sinks out of layers with lists."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        if backend.geometry.attention.chosen_width and cache.sinks is not None:
            cache = replace(cache, sinks=torch.full_like(cache.sinks, float("-inf")))
        original(q, cache, batch, out, *lse)

    around(backend, "attend", call)


def _has_lists(geometry: Geometry) -> bool:
    return geometry.attention.chosen_width > 0


MUTANTS = (
    chosen_mutant("C18", "Leaves the rows of padded requests unwritten", LiveRowsOnly),
    chosen_mutant("C19", "Computes the first 16 rows of a batch with lists", SixteenRows),
    on_reference("C20", "Reads stale lists of padding rows", _stale_lists_of_padding, "vllm#42810"),
    on_reference("C21", "Reads listed rows of strided pages as packed", _packed_pages, "flashinfer#1341"),
    chosen_mutant("C22", "Takes a listed slot for a place in the page table", PagesOfTheTable, "sglang#28028"),
    chosen_mutant("C23", "Writes KV that the engine has stored, with lists", StoresAnyway),
    on_reference("C24", "Leaves the cap out with lists", _without(logits_soft_cap=0.0)),
    on_reference("C25", "Leaves the sinks out with lists", _no_sinks),
    on_reference(
        "C26", "Refuses lists of K and V apart without naming them",
        hooks=_refuses(lambda g: _has_lists(g) and not g.attention.latent, "this layer is not one of ours"),
    ),
    on_reference("C30", "Reads the lists of the first plan of a size", _lists_of_the_capture),
    chosen_mutant("C31", "Computes the live rows of the captured batch", RowsOfTheCapture),
    chosen_mutant("C32", "Reads the counts of lists on the host", CountsOnTheHost),
    on_reference(
        "C36", "Sizes a copy of the lists by requests", source="vllm#34552",
        hooks=_with_lists(lambda g: (g.max_reqs, g.attention.chosen_width)),
    ),
    on_reference(
        "C37", "Sizes a copy of the lists for 64 keys", source="vllm#55563",
        hooks=_with_lists(lambda g: (g.max_rows_any, min(64, g.attention.chosen_width))),
    ),
    on_reference(
        "C38", "Sizes the counts of the lists by live requests",
        hooks=_with_lists(lambda g: (g.limits.max_num_reqs,), "chosen_counts"),
    ),
    on_reference(
        "C39", "Claims chosen keys, and refuses lists of 2,048 keys",
        hooks=_refuses(lambda g: g.attention.chosen_width >= 2048, "chosen_width above 2047 is not served here"),
    ),
    chosen_mutant("C41", "Keeps the lists of the first forward of a size", ListsByRows, "sglang#31198"),
    chosen_mutant("C42", "Reads one entry of each list after a failed forward", AfterAFailure),
    on_reference("C43", "Reads entries up to the largest count of a row so far", _largest_counts_so_far),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("C18", "C19", "C20"), "chosen.padding_may_be_most"),
    **dict.fromkeys(("C21", "C22", "C23"), "chosen.engine_forms_may_have_lists"),
    **dict.fromkeys(("C24", "C25", "C26"), "chosen.features_are_served_or_refused"),
    **dict.fromkeys(("C30", "C31", "C32"), "chosen.replays_read_other_lists"),
    **dict.fromkeys(("C36", "C37", "C38"), "chosen.buffers_cover_every_list"),
    "C39": "chosen.claims_are_served",
    **dict.fromkeys(("C41", "C42", "C43"), "chosen.histories_equal_the_oracle"),
}
