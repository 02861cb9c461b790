"""Queues rounds on a late device as an engine with overlap does, and checks the results of each round."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from draftmark.geometry import Mode

from ..cases.forwards import ForwardCase
from ..cases.geometries import describe
from ..cases.graph_rounds import key_of
from ..check import ContractViolation
from ..late_device import FAILED
from .eagerly import NOTE, RIGHT, eager_run
from .expected import Expected
from .graph_harness import GraphHarness, Loaded
from .late_device import Lateness, running_late
from .late_round import Round, live_batch, memory_of

KINDS = ("exact", "unknown", "exact", "upper_bound", "exact", "tight_bound")
"""Kinds of host lengths, one per round in turn. Most, and the last one, contain numbers that differ between rounds."""
REMEDY = (
    "do not write on the host what the device still has to read: give each round in flight its own slot, and wait for "
    "the slot's fence (draftmark.transfer.fence) before the next use"
)


class LateHarness:
    """Queues the rounds of one `GraphHarness`. The device copies a round's inputs in, runs it, and copies results out.

    Attributes:
        rounds: rounds made by `stage`, in the order of `send`.
    """

    def __init__(self, graphs: GraphHarness) -> None:
        self.graphs, self.harness = graphs, graphs.harness
        self.rounds: list[Round] = []

    # -- set-up, while the device is not late -------------------------------------------------------------

    def capture(self, forwards: Sequence[ForwardCase]) -> None:
        """Capture the graphs of all rounds except prefills. Call this before `stage`, which reuses the tensors."""
        keys = {key_of(forward) for forward in forwards if forward.mode is not Mode.EXTEND}
        for key in sorted(keys, key=lambda key: -key.batch_size):
            self.graphs.capture(key)

    def stage(self, forwards: Sequence[ForwardCase]) -> None:
        """Copy the inputs of all rounds to the device and compute their expected results. Poison the arena."""
        self.rounds = [Round.of(self.harness.place(forward)) for forward in forwards]
        self._reset()
        last: Expected | None = None
        for number, one in enumerate(self.rounds):
            last = one.stage(self.harness, 100 * number, last)

    def _reset(self) -> None:
        """Restore the state before the first round: KV of earlier forwards, a poisoned arena, no results."""
        first = [one.forwards[0] for one in self.rounds]
        live = tuple(request for forward in first for request in forward.requests if request.live)
        # No two rounds share a page, so one fill can set the earlier KV of all rounds.
        self.harness.tensors.fill_cache(replace(first[-1], requests=live))
        for one in self.rounds:
            one.copies, one.outs = [], []
        self.graphs.clear_outputs()
        self.harness.arena.poison()

    def _rehearse(self, captured: bool) -> None:
        """Run all rounds once without a delay, so that no kernel is compiled or loaded while the device is late."""
        if self.harness.subject.device == "cpu":
            return
        for number, one in enumerate(self.rounds):
            self._send(one, self._plan(one, number), captured, None)
        self._reset()

    # -- rounds that run on the late device ---------------------------------------------------------------

    def send(self, *, captured: bool = False, halfway: bool = False, reopen_after: int = 0) -> None:
        """Queue all rounds on a late device, and wait for the device at the end.

        Args:
            captured: True to replay graphs for all rounds except prefills.
            halfway: plan the next round while the device is between a round's metadata and its attention. Otherwise
                plan all rounds before the device runs any.
            reopen_after: after this number of rounds, drop the backend and its arena and continue with a new one.

        Raises:
            ContractViolation: a step waits for the device, or fails when the device runs it.
        """
        self._rehearse(captured)
        with _failures(self.rounds), running_late(self.harness.subject.device, self._on_device()) as late:
            for number, one in enumerate(self.rounds):
                self.harness.subject.current = one.forwards[-1]
                if not halfway:
                    late.linger()
                loaded = self._plan(one, number)
                waited = len(late.waits)
                self._send(one, loaded, captured, late if halfway else None)
                _assert_no_wait(one, late.waits[waited:])
                if number + 1 == reopen_after:
                    self._reopen()

    def _plan(self, one: Round, number: int) -> Loaded:
        """Run plan() with this round's host lengths, while the device has not yet run an earlier round."""
        kind = "exact" if self.harness.host == "exact" else KINDS[number % len(KINDS)]
        if one.is_ragged:
            one.move_to(self.graphs.step_tensors)
        pairs = zip(one.forwards, self.graphs.step_tensors, strict=False)
        loaded = Loaded(one.forwards, [live_batch(forward, live, kind) for forward, live in pairs], one.expected)
        self.graphs.plan(loaded)
        if not one.is_ragged:
            one.move_to(self.graphs.step_tensors)
        return loaded

    def _send(self, one: Round, loaded: Loaded, captured: bool, late: Lateness | None) -> None:
        if captured and not one.is_ragged:
            self._replay(one, loaded)
        else:
            self._run(one, loaded, late)

    def _run(self, one: Round, loaded: Loaded, late: Lateness | None) -> None:
        """Run a round eagerly. With `late` the device pauses in the middle of the round's last step."""
        for forward, batch, live in zip(one.forwards, loaded.batches, self.graphs.step_tensors, strict=False):
            self.harness.backend.write_metadata(batch)
            one.copies.append(self.graphs.copied())
            if late is not None:
                late.linger()
            if self.harness.kernels:
                self.harness.layer(forward, batch, live)
            one.outs.append(self.harness.output_of(forward, live))
        if late is not None:
            late.arrive()

    def _replay(self, one: Round, loaded: Loaded) -> None:
        key = key_of(one.forwards[-1])
        self.graphs.replay(key, loaded)
        one.copies = [{name: copy.clone() for name, copy in step.items()} for step in self.graphs.copies[key]]
        pairs = zip(one.forwards, self.graphs.step_tensors, strict=False)
        one.outs = [self.harness.output_of(forward, live) for forward, live in pairs]

    def _reopen(self) -> None:
        """Drop the backend and its arena while its work is in flight, and open it again on other memory."""
        del self.harness.backend, self.harness.arena
        gc.collect()
        self.harness.backend, self.harness.arena = self.harness.subject.open(self.harness.geometry)

    def _on_device(self) -> list[torch.Tensor]:
        """Return every tensor in device memory, for the queue on a CPU. The arena marks its own host buffers."""
        found = [self.harness.arena[name] for name in self.harness.arena]
        found += [tensor for stage in self.graphs.step_tensors for tensor in memory_of(stage)]
        return found + [tensor for one in self.rounds for tensor in one.on_device()]

    # -- assertions about the results of all rounds -------------------------------------------------------

    def assert_rounds(self) -> None:
        """Compare each round's metadata and outputs with its own batch, and the pool with the result of all rounds."""
        for number, one in enumerate(self.rounds):
            with self._describes_round(one, number):
                one.assert_round(self.harness, "the output")
        last = self.rounds[-1]
        self.harness.assert_cache(last.forwards[-1], last.expected[-1])
        self.harness.assert_guards(last.forwards[-1])

    @contextmanager
    def _describes_round(self, one: Round, number: int) -> Iterator[None]:
        """Add to a violation the number of its round, and the result of that round without a delay."""
        try:
            yield
        except ContractViolation as found:
            found.what += f", in round {number + 1} of {len(self.rounds)}, all sent to a late device"
            alone = eager_run(self.harness, one.forwards)
            if alone == RIGHT:
                found.details["remedy"] = found.details["remedy"] or REMEDY
                alone = "right: the same batch in a fresh arena; the fault is in what the host does before it runs"
            found.add_note(f"{NOTE}, on time: {alone}")
            raise


def _assert_no_wait(one: Round, waits: Sequence[str]) -> None:
    if waits:
        raise ContractViolation(
            "a step waits for the device",
            batch=one.forwards[-1],
            got=", ".join(waits),
            expected="work that is only sent; plan() may wait for its own fence",
            formula="draftmark.backend.AttentionBackend",
            bug="sglang#29413",
        )


@contextmanager
def _failures(rounds: Sequence[Round]) -> Iterator[None]:
    """Turn an error of queued work, raised when a `LateDevice` runs that work, into a violation."""
    try:
        yield
    except Exception as error:
        where = [note for note in getattr(error, "__notes__", ()) if note.startswith(FAILED)]
        if not where:
            raise
        names = ", ".join(one.forwards[-1].name for one in rounds)
        raise ContractViolation(
            "work that was sent fails when a late device gets there",
            batch=f"{names}\n{describe(rounds[-1].forwards[-1].geometry)}",
            got=f"{type(error).__name__}: {error} ({where[0]})",
            expected="the result of the same work without a delay",
            bug="sglang#40025",
            remedy=REMEDY,
        ) from error
