"""Mutants that the checks of `history` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import BufferSpec, Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree, UpperBound

from ..designs.changes import on_host_lengths
from ..designs.layouts import CSR, of_tutorial
from ..designs.plain_attention import Parts, attending
from ..designs.tutorial import Backend
from ..designs.tutorial_plans import Mapped, Planned, bounds_of, plugin, schedule, schedule_usage
from ..mutant import Mutant, around, on_batch


def _offsets_by_totals(backend: Any) -> None:
    """Keep the row offsets of EXTEND while the numbers of requests and rows stay equal, even if q_lens change."""
    kept: dict[tuple[int, int], Tensor] = {}

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        if batch.mode is not Mode.EXTEND:
            return batch
        if kept.keys() != {(batch.padded_reqs, batch.num_rows)}:
            kept.clear()
        offsets = kept.setdefault((batch.padded_reqs, batch.num_rows), batch.q_indptr.clone())
        return replace(batch, q_indptr=offsets)

    on_batch(change, "write_metadata")(backend)


def _plan_once(backend: Any) -> None:
    done: set[Any] = set()

    def call(original: Any, batch: ForwardBatch) -> None:
        key = (batch.mode, batch.step, batch.padded_reqs, batch.q_lens)
        if key not in done:
            done.add(key)
            original(batch)
            backend.__dict__.setdefault("kept", {})[key] = backend._widths
        backend._widths = backend.kept[key]

    around(backend, "plan", call)


BYTE = {"layouts": CSR, "absent": "the counter belongs to the mutant, so one layout is enough"}


def _byte(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    return [*specs, BufferSpec("steps", (1,), "int8", "a counter", zeros=True)]


def _counted(backend: Any) -> None:
    """Count steps in a signed byte. After it overflows to negative values, hide the draft tokens."""
    steps = backend.arena["steps"]

    def write_metadata(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        steps.add_(1)

    def seen(visible: Tensor, prefix: Tensor, shape: Any) -> Tensor:
        return visible & ((torch.arange(visible.shape[2]) < prefix[:, None])[:, None] | (steps >= 0))

    around(backend, "write_metadata", write_metadata)
    attending(Parts(seen=seen))(backend)


class PlanMemo(Planned):
    """Skips a plan when the sum and maximum of the lengths are unchanged, so swapped requests keep the old plan."""

    last: tuple[object, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        lens = bounds_of(batch)
        key = (batch.mode, batch.step, batch.padded_reqs, batch.num_reqs, sum(lens), max(lens, default=0))
        if key != self.last:
            self.last = key
            super().plan(batch)


class IncrementalTable(Mapped):
    """Copies only new page-table columns while a row's first page is unchanged and its length did not shrink.

    A preempted request can return to its row with the same first page from the prefix cache and other pages after it.
    Another request with the same prompt has the same first page too.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.table, self.lens = arena["table"], arena["last_lens"]

    def write_metadata(self, batch: ForwardBatch) -> None:
        table, lens = self.table[: batch.padded_reqs], self.lens[: batch.padded_reqs]
        same = (table[:, 0] == batch.page_table[:, 0]) & (batch.prefix_lens >= lens)
        column = torch.arange(table.shape[1], device=batch.device)
        known = same[:, None] & (column < (lens // self.shape.page_size)[:, None])
        table.copy_(torch.where(known, table, batch.page_table))
        lens.copy_(batch.prefix_lens)
        super().write_metadata(batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, replace(batch, page_table=self.table[: batch.padded_reqs]), out)


def own_table(geometry: Geometry) -> list[BufferSpec]:
    shape, one = (geometry.max_reqs, geometry.max_pages_per_req), (geometry.max_reqs,)
    formula = "max_reqs × max_pages_per_req"
    return [
        BufferSpec("table", shape, "int32", formula, zeros=True),
        BufferSpec("last_lens", one, "int32", "max_reqs", zeros=True),
    ]


def table_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"table": 4 * batch.padded_reqs * geometry.max_pages_per_req, "last_lens": 4 * batch.padded_reqs}


class TopkOneIsChain(Backend):
    """Attends causally to draft tokens if topk is 1, although n-gram and suffix drafters make trees without topk."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.chain = geometry.draft.topk == 1

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        if self.chain and isinstance(batch.tail, Tree):
            depth = torch.arange(tail_len, device=prefix.device).expand(batch.padded_reqs, -1)
            causal = torch.arange(tail_len, device=prefix.device)
            words = pack(causal <= causal[tail_len - (rows.stop - rows.start) :, None], batch.tail.mask.shape[1])
            mask = batch.tail.mask.clone()
            mask[rows] = words
            batch = replace(batch, tail=Tree(mask, depth))
        return super()._visible(batch, request, rows, prefix, tail_len)


def pack(bits: torch.Tensor, words: int) -> torch.Tensor:
    """Pack bool ``[rows, T]`` into int32 ``[rows, words]``."""
    padded = torch.nn.functional.pad(bits, (0, words * 32 - bits.shape[1])).view(len(bits), words, 32)
    return (padded.long() << torch.arange(32, device=bits.device)).sum(-1).to(torch.int32)


def _no_tail(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if not isinstance(batch.host, UpperBound):
        return batch
    short = tuple(max(0, n - t) for n, t in zip(batch.host.lens, batch.tail_lens, strict=False))
    return replace(batch, host=UpperBound(short))


def _page_less(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if not isinstance(batch.host, UpperBound):
        return batch
    return replace(batch, host=UpperBound(tuple(max(0, n - 1) for n in batch.host.lens)))


MUTANTS = (
    Mutant("M14", "Runs the plan once per batch shape", "sglang#26019", patch=_plan_once),
    Mutant("R28", "Keeps EXTEND's row offsets while the numbers of requests and rows are unchanged",
           "vllm-ascend#5711", patch=_offsets_by_totals),
    of_tutorial(
        "S31",
        "Skips the plan while mode, size, total length and longest length are unchanged",
        "a plan cache keyed on totals; fails when requests swap places in the batch (leave and join)",
        plugin(PlanMemo, schedule),
        schedule_usage,
    ),
    of_tutorial(
        "S40",
        "Copies only new columns of the page table while a row's first page is unchanged",
        "incremental block tables; a preempted request returns with a cached first page",
        plugin(IncrementalTable, own_table),
        table_usage,
    ),
    of_tutorial(
        "S45",
        "Treats topk 1 as a chain, even if the batch has a tree",
        "n-gram, suffix and Medusa trees with a drafter that has no topk",
        plugin(TopkOneIsChain),
    ),
    Mutant("T06", "Counts steps in a signed byte that overflows", "an epoch that turns over",
           hooks={"buffers": _byte, "usage": lambda geometry, found: {**found, "steps": 1}}, patch=_counted, **BYTE),
    Mutant("W76", "Treats a host bound as including the tail", "sglang#26753", patch=on_host_lengths(_no_tail)),
    Mutant("W77", "Treats a host bound as exclusive", "sglang#26753", patch=on_host_lengths(_page_less)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("R28", "S31", "S40", "S45"), "history.equals_a_fresh_state"),
    "T06": "history.an_arena_serves_for_long",
}
