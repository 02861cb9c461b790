"""Mutants of what the host does while the device is late: all of them are right where nothing is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.graphs import is_recording, record_call
from draftmark.graphs.active import LATE

from .mutant import Mutant, after, around
from .staging import HOOKS, Launched, Staging, staged


@contextmanager
def _on_another_stream(target: torch.Tensor) -> Iterator[None]:
    """What the block does to `target` runs at once, in no order with what was sent: a stream that waits for nobody."""
    token = LATE.set(None)
    try:
        with torch.cuda.stream(torch.cuda.Stream()) if target.is_cuda else nullcontext():
            yield
    finally:
        LATE.reset(token)


class Unfenced(Staging):
    """Two slots by turns, and nobody waits."""

    def wait(self, index: int) -> None:
        """Two rounds in flight, it is thought, is all there can be."""


class OneSlot(Unfenced):
    """One slot for all rounds."""

    def choose(self, batch: ForwardBatch) -> int:
        return 0


class SlotOfMode(Unfenced):
    """A slot for the captured modes and one for the others."""

    def choose(self, batch: ForwardBatch) -> int:
        return int(batch.uniform is None)


class EarlyFence(Staging):
    """The fence is recorded before the copy is sent."""

    def copy(self, index: int) -> None:
        self.fences[index].record()
        super().copy(index)

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        index = self.choose(batch)
        self.wait(index)
        self.slots[index].copy_(torch.tensor(numbers, dtype=torch.int32))
        self.copy(index)


class OtherFence(Staging):
    """It waits for the slot that was used last, and writes the other."""

    def choose(self, batch: ForwardBatch) -> int:
        self.turn += 1
        return 0

    def wait(self, index: int) -> None:
        self.fences[1 - index].synchronize()


class FirstFence(Staging):
    """The fence is recorded when a slot is used first."""

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        if self.turn < len(self.slots):
            super().send(batch, numbers)
            return
        index = self.choose(batch)
        self.wait(index)
        self.slots[index].copy_(torch.tensor(numbers, dtype=torch.int32))
        self.copy(index)


class Cleared(Staging):
    """The slot is cleared when the copy is sent."""

    def copy(self, index: int) -> None:
        super().copy(index)
        self.slots[index].zero_()


class Forgotten(Launched):
    """Nothing keeps the slots when the backend goes."""

    def keep(self, slots: torch.Tensor) -> None:
        """The arena does, it is thought."""


class CopiedInGraph(OneSlot):
    """The copy is part of the captured region; plan() writes the pinned slot and no more."""

    def copy(self, index: int) -> None:
        """Later."""

    def before_use(self) -> None:
        self.target.copy_(self.slots[0], non_blocking=True)


class AskedLate(Staging):
    """A launch takes the numbers from the live object when it runs, as a host function in a stream does."""

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def before_use(self) -> None:
        record_call(self._ask, self.target, mutates=(self.target,))

    def _ask(self, target: torch.Tensor) -> None:
        target.copy_(torch.tensor(self.numbers, dtype=torch.int32))


class OtherStream(Staging):
    """The copy is made by a stream of its own that waits for nobody."""

    def copy(self, index: int) -> None:
        with _on_another_stream(self.target):
            super().copy(index)


def _clears_slots(backend: Any) -> None:
    """plan() clears the slot mapping for its round, on a stream of its own."""

    def clear(batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"]
        with _on_another_stream(slots):
            slots.zero_()

    after(backend, "plan", clear)


def _written_by_plan(name: str) -> Callable[[Any], None]:
    """A buffer that takes host numbers alone is written by plan(), on a stream of its own."""

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
    """How many pages to gather is copied down, and read where it will be, without waiting for it."""
    down = torch.zeros(1, dtype=torch.int64, pin_memory=backend.arena["slot_mapping"].is_cuda)
    page = backend.geometry.attention.page_size
    seen = down.numpy()  # what a pointer sees: no call on a tensor betrays the read

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


MUTANTS = (
    _staged("L01", "one staging slot, rewritten while its copy waits", "vllm#25279", OneSlot),
    _staged("L02", "two staging slots by turns, and no fence", "vllm#36013", Unfenced),
    _staged("L03", "a staging slot for each kind of batch, and no fence", "vllm#31841", SlotOfMode),
    _staged("L04", "the fence recorded before the copy is sent", "sglang#28034", EarlyFence),
    _staged("L05", "the other slot's fence waited for", "sglang#37980", OtherFence),
    _staged("L06", "the fence recorded when a slot is used first", "sglang#37318", FirstFence),
    _staged("L07", "staging cleared behind the copy", "vllm#29288", Cleared),
    _staged("L08", "pinned memory dropped while a library's copy waits", "mini-sglang#103", Forgotten),
    _staged("L09", "pinned memory copied by the graph, rewritten by the next plan", "vllm-ascend#15719", CopiedInGraph),
    _staged("L10", "numbers taken from the live host object when the device gets there", "sglang#22113", AskedLate),
    _staged("L11", "plan's copy on a stream that waits for nobody", "sglang#40025", OtherStream),
    Mutant("L12", "plan clears the slots on a stream that waits for nobody", "sglang#40025", patch=_clears_slots),
    Mutant("L13", "row offsets of round n + 1 written into round n's", "sglang#32432",
           patch=_written_by_plan("qo_indptr"), layouts=("csr",), absent="no buffer holds host numbers alone"),
    Mutant("L14", "a width read where its copy has not arrived", "sglang#18746", patch=_width_not_awaited),
)  # fmt: skip
