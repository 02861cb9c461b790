"""Captures and replays graphs on a backend as an engine does: fill static buffers, plan, replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.errors import DraftmarkError
from draftmark.geometry import Form, Mode
from draftmark.graphs import GraphKey, GraphState, Program

from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import captured, key_of, programs_of, replays
from ..cases.histories import Failure
from ..check import ContractViolation
from ..oracle.formulas import draft_steps
from .eagerly import notes_eager_result
from .expected import Expected
from .harness import Harness
from .interruption import expect_interruption, run_until
from .opening import open_graphs
from .tensor_forms import TensorForm
from .watch import bits_of

Copies = list[dict[str, torch.Tensor]]
"""Copies of the metadata buffers, one dict per step of a round."""


@dataclass
class Loaded:
    """Holds a round loaded into the static tensors: its forwards, its batches, and the expected results."""

    forwards: list[ForwardCase]
    batches: list[ForwardBatch]
    expected: list[Expected]


class GraphHarness:
    """Captures and replays all graph programs of one backend. Each DRAFT step has its own static buffers.

    Attributes:
        state: the backend's graph state.
        forms: layout of each captured graph's page table and KV pages, by graph key.
        copies: copies of the metadata buffers after each captured step, by graph key. Each replay overwrites them.
        runs: number of times that a captured step ran as Python.
        step_tensors: static tensors of each step of a round.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.copies: dict[GraphKey, Copies] = {}
        self.forms: dict[GraphKey, TensorForm] = {}
        self.runs = 0
        self.state: GraphState = harness.subject.graph_state(harness.geometry)
        steps = max(1, draft_steps(harness.geometry)) if Mode.DRAFT in harness.geometry.modes else 1
        # A capture copies device buffers only. plan() writes the host buffers, and a copy of them would be pageable
        # memory.
        self._on_device = [one.name for one in harness.arena.specs if not one.pinned]
        self.step_tensors = [harness.more_tensors() for _ in range(steps)]
        self.take(TensorForm())
        harness.tensors = self.step_tensors[0]

    def fresh(self) -> GraphHarness:
        """Return a harness that opens this backend again, without captured graphs."""
        return GraphHarness(self.harness.fresh())

    def take(self, form: TensorForm) -> None:
        """Lay out the page tables and the KV pages of all steps in this form. The steps share their KV pages."""
        self._form = form
        first, *others = self.step_tensors
        first.take(form)
        for tensors in others:
            tensors.take(form)
            tensors.share_pages(first)

    @property
    def programs(self) -> list[Program]:
        """Programs that the modes of the geometry need."""
        return programs_of(self.harness.geometry)

    def rounds(self, program: Program) -> list[tuple[bool, ForwardCase]]:
        """Return the batches that a program replays, each with True if the arena is poisoned first."""
        return replays(self.harness.geometry, program)

    # -- steps at start-up: warm-up and capture -----------------------------------------------------------

    def warm_up(self, key: GraphKey, short: bool = False) -> tuple[Loaded, Copies]:
        """Run the step of a graph key eagerly on its capture batch. Return the round and copies of its metadata."""
        loaded = self._round_of_capture(key, short)
        self.harness.arena.poison()
        self.plan(loaded)
        return loaded, self.step(loaded)

    @notes_eager_result
    def record(self, key: GraphKey, loaded: Loaded, cold: bool = False) -> Copies:
        """Capture the step of a round. The first replay fills the returned copies. `cold` skips the eager run."""

        def step() -> Copies:
            self.runs += 1
            return self.step(loaded)

        self.harness.arena.poison()
        self.plan(loaded)
        # A device's graph state runs the step once before the capture, so this run does the same on the host tier. The
        # capture must not skip work because this run has already done it.
        if not cold:
            self.step(loaded)
        with _refusals(f"capturing {key}", loaded.forwards[-1]), no_sync(self.harness.subject.device):
            self.copies[key] = self.state.capture(key, step)
        self.forms[key] = self._form
        return self.copies[key]

    def fail_to_capture(self, key: GraphKey, failure: Failure, short: bool = False) -> None:
        """Capture a step that fails, and check that the graph state has no graph of its key."""
        loaded, _ = self.warm_up(key, short)
        self.plan(loaded)

        def step() -> None:
            steps = zip(loaded.forwards, loaded.batches, self.step_tensors, strict=False)
            *earlier, last = (self.harness.calls(*one) for one in steps)
            for calls in (*earlier, last):
                del calls["plan"]
            for calls in earlier:
                for call in calls.values():
                    call()
            run_until(failure, last)

        with expect_interruption(), no_sync(self.harness.subject.device):
            self.state.capture(key, step)
        if key in self.state.keys:
            raise ContractViolation(
                f"the graph state keeps {key} although the capture failed",
                batch=loaded.forwards[-1],
                got=sorted(map(str, self.state.keys)),
                expected=f"no graph {key}",
                formula="draftmark.graphs.GraphState.capture",
            )

    def sleep(self) -> None:
        """Drop all graphs with their state, poison the arena, and continue with a new graph state."""
        self.copies.clear()
        self.forms.clear()
        self.state = self.harness.subject.graph_state(self.harness.geometry)
        self.harness.arena.poison()

    def capture_cold(self, key: GraphKey) -> Loaded:
        """Capture a key's graph without an eager run before it, and return the round."""
        loaded = self._round_of_capture(key)
        self.record(key, loaded, cold=True)
        return loaded

    def _round_of_capture(self, key: GraphKey, short: bool = False) -> Loaded:
        """Fill the static buffers for a capture.

        Host lengths are unknown, so that the plan fits every replay, or exact if the backend needs them.
        """
        host = "unknown" if self.harness.bounded else "exact"
        return self.load(captured(self.harness.geometry, key.program, key.batch_size, short), host=host)

    def capture(self, key: GraphKey, short: bool = False) -> Loaded:
        """Capture a key's step. The first capture comes after an eager run of its step, and later ones come first."""
        loaded = self._round_of_capture(key, short)
        self.record(key, loaded, cold=bool(self.copies))
        return loaded

    def capture_checked(self, key: GraphKey) -> Loaded:
        """Check the warm-up run of a key's step, then capture it. The static buffers keep the batch."""
        loaded, warm = self.warm_up(key)
        self.assert_round(loaded, warm, f"the warm-up before capturing {key}")
        self.clear_outputs()
        self.record(key, loaded)
        return loaded

    # -- steps of a round: fill, plan, replay -------------------------------------------------------------

    def load(self, forward: ForwardCase, seed: int = 0, host: str | None = None, *, follows: bool = False) -> Loaded:
        """Fill the static buffers for a round. For DRAFT `forward` is the last of the round's steps.

        Args:
            follows: leave the cache as the round before has left it.
        """
        forward = self.harness.subject.current = self.harness.place(forward)
        steps = range(forward.step + 1) if forward.mode is Mode.DRAFT else ()
        forwards = [forward.at_step(i) for i in steps] or [forward]
        batches: list[ForwardBatch] = []
        expected: list[Expected] = []
        # An engine that stores KV itself has stored the rows of all steps before the round.
        if not follows:
            self.step_tensors[0].fill_cache(forwards[-1 if Form.ENGINE_STORES in forward.geometry.forms else 0], seed)
        for i, (one, tensors) in enumerate(zip(forwards, self.step_tensors, strict=False)):
            batches.append(tensors.set(one, host or self.harness.host))
            tensors.fill_rows(one, seed + 10 * i)
            expected.append(self.harness.expected(one, tensors, expected[-1] if expected else None))
        return Loaded(forwards, batches, expected)

    def load_replay(self, forward: ForwardCase, number: int, poison: bool = False) -> Loaded:
        """Fill the static buffers for replay `number`. The number selects the kind of host lengths."""
        kinds = ("exact", "upper_bound", "unknown", "tight_bound")
        if poison:
            self.harness.arena.poison()
        host = kinds[number % len(kinds)] if self.harness.bounded else "exact"
        return self.load(forward, seed=number, host=host)

    @notes_eager_result
    def plan(self, loaded: Loaded) -> None:
        """Run the host part of a step, `plan`. It runs before every eager run and every replay."""
        for batch in loaded.batches:
            self.harness.backend.plan(batch)

    @notes_eager_result
    def step(self, loaded: Loaded) -> Copies:
        """Run the device part of every step: metadata and attention layer. Return copies of the metadata."""
        copies = []
        for forward, batch, tensors in zip(loaded.forwards, loaded.batches, self.step_tensors, strict=False):
            self.harness.backend.write_metadata(batch)
            copies.append(self.copied())
            if self.harness.kernels:
                self.harness.layer(forward, batch, tensors)
        return copies

    def copied(self) -> dict[str, torch.Tensor]:
        """Return copies of the metadata buffers. The copy is device work, so a captured step can contain it."""
        return {name: self.harness.arena[name].clone() for name in self._on_device}

    @notes_eager_result
    def replay(self, key: GraphKey, loaded: Loaded) -> None:
        """Replay a round that is already planned."""
        runs = self.runs
        with _refusals(f"replaying {key}", loaded.forwards[-1]), no_sync(self.harness.subject.device):
            outputs = self.state.replay(key)
        if self.runs != runs or outputs is not self.copies[key]:
            raise ContractViolation(
                f"replaying {key} is no replay",
                batch=loaded.forwards[-1],
                got="the step ran again, eagerly" if self.runs != runs else "other outputs than the capture's",
                expected="only the captured work, and the object that capture() returned",
                formula="draftmark.graphs.GraphState.replay",
                bug="sglang#36658",
            )

    def interpret(self, loaded: Loaded, copies: Copies) -> None:
        """Compute the outputs in the suite, from the metadata, if the backend's kernels cannot run in this tier."""
        if not self.harness.kernels:
            steps = zip(loaded.forwards, loaded.batches, self.step_tensors, copies, strict=False)
            for forward, batch, tensors, copy in steps:
                self.harness.interpret(forward, batch, tensors, copy)

    def outputs(self, key: GraphKey) -> list[list[int]]:
        """Return the captured return value of a key's step, as lists of bytes."""
        return [bits_of(one).tolist() for copy in self.copies[key] for one in copy.values()]

    def clear_outputs(self) -> None:
        """Fill every output with NaN, so that outputs of a warm-up cannot pass for outputs of a replay."""
        for tensors in self.step_tensors:
            tensors.clear()

    # -- assertions about the results of a round ----------------------------------------------------------

    def assert_replay(self, program: Program, loaded: Loaded, what: str = "") -> None:
        """Plan and replay a loaded round, then check it with `assert_round`."""
        forward = loaded.forwards[-1]
        key = GraphKey(program, key_of(forward).batch_size)
        self.plan(loaded)
        self.replay(key, loaded)
        self.assert_round(loaded, self.copies[key], f"the replay of {key} on {forward.name} {what}".rstrip())

    def assert_replays(self, rounds: Sequence[ForwardCase], what: str = "") -> None:
        """Capture the first batch of a list, with lengths that fit every replay, then replay and check the others.

        All batches have the first one's mode, draft step and size.
        """
        first, *others = rounds
        key = key_of(first)
        self.record(key, self.load(first, host="unknown" if self.harness.bounded else "exact"))
        for number, forward in enumerate(others, start=1):
            self.assert_replay(key.program, self.load_replay(forward, number), what)

    @notes_eager_result
    def assert_round(self, loaded: Loaded, copies: Copies, what: str) -> None:
        """Check metadata, outputs, cache and guard words of every step after a round ran."""
        steps = zip(loaded.forwards, loaded.batches, self.step_tensors, loaded.expected, copies, strict=False)
        for forward, batch, tensors, expected, copy in steps:
            self.harness.assert_metadata(forward, batch, copy)
            if not self.harness.kernels:
                self.harness.interpret(forward, batch, tensors, copy)
            self.harness.assert_output(forward, expected, what, self.harness.output_of(forward, tensors))
        self.harness.assert_cache(loaded.forwards[-1], loaded.expected[-1])
        self.harness.assert_guards(loaded.forwards[-1])


@contextmanager
def _refusals(what: str, forward: ForwardCase) -> Iterator[None]:
    """Turn an error of a graph state into a `ContractViolation`."""
    try:
        yield
    except DraftmarkError as error:
        raise ContractViolation(
            f"{what} failed",
            batch=forward,
            got=error,
            expected="a captured region without host reads, pageable copies or re-allocated tensors",
            formula="design: write_metadata, write_kv and attend are captured",
            bug="sglang#3987, sglang#29413",
        ) from error


@contextmanager
def no_sync(device: str) -> Iterator[None]:
    """Turn every hidden synchronisation into an error, where torch supports that for the device."""
    module: Any = getattr(torch, torch.device(device).type, None)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise ContractViolation("the captured region waits for the device", got=error, bug="sglang#29413") from error
    finally:
        module.set_sync_debug_mode(before)


@open_graphs.register(Harness)
def _(harness: Harness) -> GraphHarness:
    return GraphHarness(harness)
