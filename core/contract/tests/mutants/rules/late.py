"""Mutants that the checks of `late` kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from draftmark import BufferSpec, Geometry
from draftmark.graphs.active import LATE
from draftmark.runtime import Arena, ForwardBatch, is_recording, record_call

from ..designs.layouts import of_tutorial
from ..designs.staging import HOOKS, Launched, Staging, staged
from ..designs.tutorial_plans import Mapped, Planned, plugin, schedule
from ..mutant import Mutant, after, around


@contextmanager
def _on_another_stream(target: torch.Tensor) -> Iterator[None]:
    """Run the block on a stream that waits for no other stream, so its writes to `target` are unordered."""
    token = LATE.set(None)
    try:
        with torch.cuda.stream(torch.cuda.Stream()) if target.is_cuda else nullcontext():
            yield
    finally:
        LATE.reset(token)


class Unfenced(Staging):
    """Alternates two pinned slots, and rewrites a slot without waiting until its last copy has ended."""

    def wait(self, index: int) -> None:
        """Do nothing, in the wrong belief that at most two rounds are in flight."""


class OneSlot(Unfenced):
    """Uses one pinned slot for all rounds, and rewrites it without waiting until its last copy has ended."""

    def choose(self, batch: ForwardBatch) -> int:
        return 0


class SlotOfMode(Unfenced):
    """Uses one pinned slot for uniform modes and one for EXTEND, and rewrites a slot without waiting for its copy."""

    def choose(self, batch: ForwardBatch) -> int:
        return int(not batch.uniform)


class EarlyFence(Staging):
    """Records a slot's fence before the copy, so the fence can pass while the copy still reads the slot."""

    def copy(self, index: int) -> None:
        self.fences[index].record()
        super().copy(index)

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        index = self.choose(batch)
        self.wait(index)
        self.slots[index].copy_(torch.tensor(numbers, dtype=torch.int32))
        self.copy(index)


class OtherFence(Staging):
    """Waits for the fence of one pinned slot, but then rewrites the other slot."""

    def choose(self, batch: ForwardBatch) -> int:
        self.turn += 1
        return 0

    def wait(self, index: int) -> None:
        self.fences[1 - index].synchronize()


class FirstFence(Staging):
    """Records a slot's fence only at the slot's first use, so later copies are never waited for."""

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        if self.turn < len(self.slots):
            super().send(batch, numbers)
            return
        index = self.choose(batch)
        self.wait(index)
        self.slots[index].copy_(torch.tensor(numbers, dtype=torch.int32))
        self.copy(index)


class Cleared(Staging):
    """Clears the pinned slot right after the copy is enqueued, which may be before the copy runs."""

    def copy(self, index: int) -> None:
        super().copy(index)
        self.slots[index].zero_()


class Forgotten(Launched):
    """Keeps no reference to the pinned slots after the backend is deleted, while copies may still read them."""

    def keep(self, slots: torch.Tensor) -> None:
        """Do nothing, in the wrong belief that the arena keeps the slots."""


class CopiedInGraph(OneSlot):
    """Captures the copy in the graph, while plan() rewrites the pinned slot: a late replay reads later numbers."""

    def copy(self, index: int) -> None:
        """Do nothing, because `before_use` enqueues the copy."""

    def before_use(self) -> None:
        self.target.copy_(self.slots[0], non_blocking=True)


class AskedLate(Staging):
    """Reads the numbers from a Python object when the copy runs, as a host function in a stream does."""

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def before_use(self) -> None:
        record_call(self._ask, self.target, mutates=(self.target,))

    def _ask(self, target: torch.Tensor) -> None:
        target.copy_(torch.tensor(self.numbers, dtype=torch.int32))


class OtherStream(Staging):
    """Copies on a stream of its own, which waits for no other stream."""

    def copy(self, index: int) -> None:
        with _on_another_stream(self.target):
            super().copy(index)


def _clears_slots(backend: Any) -> None:
    """Clear the slot mapping in plan(), on a stream that waits for no other stream."""

    def clear(batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"]
        with _on_another_stream(slots):
            slots.zero_()

    after(backend, "plan", clear)


def _written_by_plan(name: str) -> Callable[[Any], None]:
    """Return a patch that makes plan() write a buffer of host numbers on a stream that waits for no other stream."""

    def patch(backend: Any) -> None:
        planned: list[torch.Tensor] = []

        def plan(original: Any, batch: ForwardBatch) -> None:
            original(batch)
            rows = torch.tensor((0, *batch.q_lens)).cumsum(0).to(torch.int32)
            with _on_another_stream(backend.arena[name]):
                backend.arena[name][: len(rows)].copy_(rows)

        def write(original: Any, batch: ForwardBatch) -> None:
            planned[:] = [backend.arena[name].clone()]
            original(batch)
            backend.arena[name].copy_(planned[0])

        around(backend, "plan", plan)
        around(backend, "write_metadata", write)

    return patch


def _width_not_awaited(backend: Any) -> None:
    """Copy the number of pages to gather to the host, and read it without waiting for the copy."""
    down = torch.zeros(1, dtype=torch.int64, pin_memory=backend.arena["slot_mapping"].is_cuda)
    page = backend.geometry.attention.page_size
    seen = down.numpy()  # reads through numpy do not go through torch, so the suite cannot intercept them

    def write(batch: ForwardBatch) -> None:
        longest = batch.prefix_lens.max() + max(batch.tail_lens)
        down.copy_(((longest + page - 1) // page).view(1), non_blocking=True)

    def attend(original: Any, q: torch.Tensor, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        if not is_recording():
            backend._widths = (max(1, int(seen[0])),) * batch.padded_reqs
        original(q, cache, batch, out)

    after(backend, "write_metadata", write)
    around(backend, "attend", attend)


def _staged(name: str, what: str, source: str, kind: type[Staging]) -> Mutant:
    return Mutant(name, what, source, HOOKS, patch=staged(kind))


RING = 8


class StagingRing(Planned):
    """Rotates through eight pinned buffers without a fence: correct until the device is nine plans late."""

    turn = 0

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.staging = arena["staging"]

    def send(self, lens: tuple[int, ...]) -> None:
        row = self.staging[self.turn % RING, : len(lens)]
        self.turn += 1
        row.copy_(torch.tensor(lens, dtype=torch.int32))
        self.bounds[: len(lens)].copy_(row, non_blocking=True)


def ring_buffers(geometry: Geometry) -> list[BufferSpec]:
    shape, formula = (RING, geometry.max_reqs), "8 × max_reqs"
    staging = BufferSpec("staging", shape, "int32", formula, pinned=True)
    return [*schedule(geometry), staging]


def ring_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"bounds": 4 * batch.padded_reqs, "staging": 4 * RING * geometry.max_reqs}


class TailCell(Mapped):
    """`plan` stores the tail length in one cell, so all steps of a multi-step draft graph use the last step's value."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.cell = arena["tail_len"]

    def plan(self, batch: ForwardBatch) -> None:
        if batch.uniform:
            self.cell.fill_(batch.tail_lens[0])

    def tail_of(self, batch: ForwardBatch) -> torch.Tensor:
        return self.cell if batch.uniform else batch.q_indptr.diff()


def cell_buffer(geometry: Geometry) -> list[BufferSpec]:
    return [BufferSpec("tail_len", (1,), "int32", "1")]


def _cell_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"tail_len": 4}


MUTANTS = (
    _staged("L01", "Rewrites the only staging slot while its copy is pending", "vllm#25279", OneSlot),
    _staged("L02", "Alternates two staging slots without a fence", "vllm#36013", Unfenced),
    _staged("L03", "Uses one staging slot per kind of batch without a fence", "vllm#31841", SlotOfMode),
    _staged("L04", "Records the fence before it enqueues the copy", "sglang#28034", EarlyFence),
    _staged("L05", "Waits for the fence of the other slot", "sglang#37980", OtherFence),
    _staged("L06", "Records a fence only at the first use of a slot", "sglang#37318", FirstFence),
    _staged("L07", "Clears the staging slot right after it enqueues the copy", "vllm#29288", Cleared),
    _staged("L08", "Frees pinned memory while a library's copy is pending", "mini-sglang#103", Forgotten),
    _staged("L09", "Copies pinned memory in the graph, while the next plan rewrites it",
            "vllm-ascend#15719", CopiedInGraph),
    _staged("L10", "Reads numbers from a live host object when the device gets there", "sglang#22113", AskedLate),
    _staged("L11", "Copies the plan on a stream that waits for no other stream", "sglang#40025", OtherStream),
    Mutant("L12", "Clears the slots in plan on a stream that waits for no other stream",
           "sglang#40025", patch=_clears_slots),
    Mutant("L13", "Writes the row offsets of round n + 1 while round n still reads them", "sglang#32432",
           patch=_written_by_plan("qo_indptr"), layouts=("csr",), absent="no buffer depends only on host numbers"),
    Mutant("L14", "Reads a width before its copy to the host ends", "sglang#18746", patch=_width_not_awaited),
    of_tutorial(
        "S32",
        "Stages plans in a ring of eight pinned rows without a fence",
        "vllm#25279, sglang#28034: fails when the device is more than eight plans behind the host",
        plugin(StagingRing, ring_buffers),
        ring_usage,
    ),
    of_tutorial(
        "S35",
        "Uses the tail length of the last planned draft step in all steps",
        "EAGLE's multi-step graph with one metadata object for all steps",
        plugin(TailCell, cell_buffer),
        _cell_usage,
    ),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "S32",
        "S35",
    ),
    "late.replays_in_flight_are_their_own",
)
