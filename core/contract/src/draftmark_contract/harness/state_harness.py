"""Harness of layers with recurrent state: runs their forwards on a backend and asserts outputs and slots.

`GraphHarness` and `LateHarness` run on it as on the harness of attention. A forward is one round: `plan`,
`write_metadata`, `convolve` and `recur` of each layer, then `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.geometry import Gate, Geometry, Mode, StateGeometry

from ..backend_under_test import BackendUnderTest
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..cases.state_rounds import Round
from ..check import ContractViolation
from . import assertions
from .harness import Harness
from .host_reads import host_reads
from .opening import open_harness
from .poison import poison_in
from .state_assertions import assert_rows, assert_state
from .state_expected import Place, SlotAnswer, StateExpected, state_expected
from .state_tensors import JUNK, StateTensors
from .watch import batch_tensors


class StateHarness(Harness):
    """Runs forwards of one `StateGeometry` and checks them. Raises `Refused` if the backend refuses the geometry.

    Args:
        num_slots: slots of the pool, one null slot included.

    Attributes:
        captures_commit: True if `layer` ends with the commit, so that a graph contains it.
        reverses_layers: True to run the layers from the last to the first.
        finite_padding: False if padded rows receive NaN, so that their outputs may be anything.
    """

    backend: Any
    tensors: StateTensors  # type: ignore[assignment]
    geometry: StateGeometry  # type: ignore[assignment]

    def __init__(self, subject: BackendUnderTest, geometry: StateGeometry, num_slots: int) -> None:
        self.subject, self.geometry = subject, geometry
        self.backend, self.arena = subject.open(geometry)
        self.kernels, self.null_pages = subject.kernels, 1
        self.captures_commit = self.finite_padding = True
        self.reverses_layers = False
        self.tensors = StateTensors(geometry, subject.device, num_slots)
        if not self.kernels:
            subject.opaque()

    def fresh(self) -> StateHarness:
        """Return a harness that opens this backend again, on new tensors."""
        return StateHarness(self.subject, self.geometry, self.tensors.num_slots)

    def more_tensors(self) -> StateTensors:  # type: ignore[override]
        """Return another set of tensors with the shapes of the harness's own, pool included."""
        return StateTensors(self.geometry, self.subject.device, self.tensors.num_slots)

    @property
    def host(self) -> str:
        """Kind of host lengths that every backend of state accepts: none."""
        return "unknown"

    @property
    def bounded(self) -> bool:
        """True: `plan` needs no exact host lengths."""
        return True

    # -- forwards -------------------------------------------------------------------------------------------

    def load(
        self, forward: ForwardCase, host: str | None = None, seed: int = 0, contents: Contents = Contents.USUAL
    ) -> ForwardBatch:
        """Fill the tensors with a forward: batch, rows and slots."""
        self.tensors.fill_cache(forward, seed)
        return self.follow(forward, host, seed)

    def follow(self, forward: ForwardCase, host: str | None = None, seed: int = 0) -> ForwardBatch:
        """Fill the tensors with the next forward of a sequence: batch and rows. The slots stay as they are."""
        batch = self.set(forward, host)
        self.tensors.fill_rows(forward, seed)
        return batch

    def spoil_padding(self, forward: ForwardCase) -> None:
        """Fill the inputs of padded rows with NaN."""
        self.tensors.spoil_padding(forward)

    def start(self, seed: int = 0) -> None:
        """Fill all slots with contents that no step may read."""
        self.tensors.fill_slots(JUNK[seed % len(JUNK)])

    def assert_rounds(self, rounds: Sequence[Round]) -> None:
        """Run the rounds of a sequence eagerly, on one pool, and check each."""
        self.start(rounds[0].junk)
        for number, one in enumerate(rounds):
            self.assert_round(one, number, f"the output of round {number + 1}")

    def assert_round(self, one: Round, number: int, what: str) -> None:
        """Run the next round of a sequence eagerly, and check it."""
        self.copy(one)
        self.assert_forward(one.forward, self.follow(one.forward, seed=number), what, one.commits)

    def copy(self, one: Round) -> None:
        """Copy slots as the engine does before a round."""
        for pairs in one.copies:
            source, target = (torch.tensor(slots, device=self.subject.device) for slots in zip(*pairs, strict=True))
            self.tensors.pool.copy(source, target)

    def layer(self, forward: ForwardCase, batch: ForwardBatch, tensors: StateTensors | None = None) -> None:  # type: ignore[override]
        """Run the rows of every layer, then the commit if graphs contain it."""
        self.rows(forward, batch, tensors)
        if self.captures_commit:
            self.commit(forward, batch, tensors)

    def rows(self, forward: ForwardCase, batch: ForwardBatch, tensors: StateTensors | None = None) -> None:
        """Run `convolve` and `recur` of every layer."""
        for name, call in self.calls(forward, batch, tensors).items():
            if name.startswith(("convolve", "recur")):
                call()

    def commit(self, forward: ForwardCase, batch: ForwardBatch, tensors: StateTensors | None = None) -> None:
        """Run `commit`."""
        calls = self.calls(forward, batch, tensors)
        if "commit" in calls:
            calls["commit"]()

    def calls(  # type: ignore[override]
        self, forward: ForwardCase, batch: ForwardBatch, tensors: StateTensors | None = None
    ) -> dict[str, Callable[[], None]]:
        """Return the calls of a forward that run in this tier, by name and in order."""
        t, b = tensors or self.tensors, self.backend
        calls: dict[str, Callable[[], None]] = {
            "plan": lambda: b.plan(batch),
            "write_metadata": lambda: b.write_metadata(batch),
        }
        if not self.kernels:
            return calls
        self.subject.attended = True
        layers = [*range(len(t.layers))]
        for layer in layers[::-1] if self.reverses_layers else layers:
            given = self._given(forward, t, layer)
            for name in ("convolve", "recur"):
                if name in given:
                    *inputs, out = given[name]
                    call = partial(getattr(b, name), *inputs, t.pool.layers[layer], batch, out)
                    calls[f"{name} of layer {layer}"] = call
        accepted = None if forward.mode in (Mode.EXTEND, Mode.DECODE) else t.result(forward)
        saves = t.save_slots[: len(forward.requests)] if t.has_saves else None
        calls["commit"] = lambda: b.commit(t.pool, batch, accepted, saves)
        return calls

    def _given(self, forward: ForwardCase, tensors: StateTensors, layer: int) -> dict[str, list[torch.Tensor | None]]:
        """Return the inputs of each call of a layer, and its output last."""
        whole, constant = tensors.layers[layer], self.geometry.state.gate is Gate.CONSTANT
        kept = ("weight", "bias", *(("log_decay",) if constant else ()))
        r = {name: one if name in kept else one[: forward.num_rows] for name, one in whole.tensors()}
        names = {
            "convolve": ("x", "weight", "bias", "convolved"),
            "recur": ("q", "k", "v", "log_decay", "beta", "out"),
        }
        return {call: [r.get(name) for name in some] for call, some in names.items() if some[0] in r}

    def run(self, forward: ForwardCase, batch: ForwardBatch) -> torch.Tensor:
        """Run one eager forward with its commit, and return a copy of its outputs, flat."""
        self.prepare(batch)
        self.layer(forward, batch)
        return self.answer(forward)

    def answer(self, forward: ForwardCase) -> torch.Tensor:
        """Return a copy of the outputs of all layers, one line for each row."""
        outs = [one.flatten(1) for name, one in self.tensors.outputs(forward).items() if not name.endswith("after")]
        return torch.cat(outs, -1)

    def writes_of(self, call: str, forward: ForwardCase) -> list[str]:
        """Return the names of the tensors that a call may write, as in `StateTensors.named`."""
        own = forward.mode in (Mode.EXTEND, Mode.DECODE)
        kind, _, layer = call.partition(" of layer ")
        if kind == "commit":
            return ["cache.state", "cache.conv"]
        names = {"convolve": ("out convolved", "cache.conv"), "recur": ("out out", "cache.state")}.get(kind)
        return [f"{names[0]} {layer}", *([names[1]] * own)] if names else []

    def bits_of_round(self, forward: ForwardCase, seed: int) -> dict[str, torch.Tensor]:
        """Run a forward over a poisoned arena, and return the bits of its live outputs and of the slots."""
        batch = self.load(forward, seed=seed)
        self.arena.poison()
        found = {"the outputs": self.bits(self.run(forward, batch)[: forward.live_rows])}
        # Null slots hold whatever padding leaves there.
        kept = self.tensors.bits().items()
        return found | {name: bits[:, forward.null_pages :] for name, bits in kept}

    # -- assertions -----------------------------------------------------------------------------------------

    def expected(  # type: ignore[override]
        self, forward: ForwardCase, tensors: StateTensors | None = None, after: StateExpected | None = None
    ) -> StateExpected:
        """Return the expected result on these tensors, by default the harness's own."""
        return state_expected(forward, tensors or self.tensors, after)

    def assert_forward(
        self, forward: ForwardCase, batch: ForwardBatch, what: str = "the output", commits: bool = True
    ) -> torch.Tensor:
        """Run one eager forward that is loaded into the tensors. Check outputs, and slots before and after its commit.

        Args:
            commits: False to leave the round without a commit.
        """
        expected = self.expected(forward)
        self.prepare(batch)
        self.rows(forward, batch)
        self.assert_output(forward, expected, what)
        self.assert_slots(forward, expected, expected.verified, "before the commit")
        if commits:
            self.commit(forward, batch)
            self.assert_slots(forward, expected, expected.committed, "after the commit")
        self.assert_guards(forward)
        return self.answer(forward)

    def assert_step(self, forward: ForwardCase, batch: ForwardBatch, expected: StateExpected, what: str) -> None:  # type: ignore[override]
        """Check outputs, slots and guard words of a forward that has run with its commit."""
        self.assert_output(forward, expected, what)
        self.assert_cache(forward, expected)
        self.assert_guards(forward)

    def assert_metadata(
        self, forward: ForwardCase, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Do nothing: metadata of recurrent state has no declared layout."""

    def interpret(self, *args: object) -> None:
        """Do nothing: without its kernels a backend of recurrent state is not judged."""

    def assert_cache(self, forward: ForwardCase, expected: StateExpected, tensors: object = None) -> None:  # type: ignore[override]
        """Check the slots after a round."""
        self.assert_slots(forward, expected, expected.committed, "after the round")

    def output_of(self, forward: ForwardCase, tensors: StateTensors) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return copies of a forward's outputs by name, for `assert_output`. The copies are device work."""
        return {name: one.clone() for name, one in tensors.outputs(forward).items() if not name.endswith("after")}

    def assert_output(  # type: ignore[override]
        self,
        forward: ForwardCase,
        expected: StateExpected,
        what: str = "the output",
        out: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Check that live rows match float64 within rounding, and that padded rows are finite.

        Args:
            out: outputs as `output_of` returns them; by default those of the harness's tensors.
        """
        if not self.kernels:
            return
        outs = self.tensors.outputs(forward) if out is None else out
        for layer, pair in enumerate(zip(expected.convolved, expected.out, strict=True)):
            for kind, name, want in zip(("convolution", "recurrence"), ("convolved", "out"), pair, strict=True):
                got = outs.get(f"out {name} {layer}")
                if got is not None:
                    where = f"{what} of layer {layer}'s {kind}"
                    assert_rows(got, want, forward, where, self.finite_padding)

    def assert_slots(
        self, forward: ForwardCase, expected: StateExpected, written: dict[Place, SlotAnswer], when: str
    ) -> None:
        """Check that each written slot stores its state and window, and that every other slot keeps its bytes."""
        if not self.kernels:
            return
        for (layer, slot), answer in written.items():
            self._assert_slot(forward, layer, slot, answer, when)
        now = self.tensors.bits()
        for name, before in expected.before.items():
            changed = (before != now[name]).flatten(2).any(-1).nonzero().tolist()
            places = [(layer, int(self.tensors.compared[at])) for layer, at in changed]
            wrong = [place for place in places if place[1] >= forward.null_pages and place not in written]
            if wrong:
                raise ContractViolation(
                    f"{when} the {name} of slots differs that the round must not write",
                    batch=forward,
                    got=f"changed bytes at (layer, slot) {wrong[:8]}",
                    expected="the bytes from before the round",
                    formula="a verify only reads slots; a commit moves the slots of requests with accepted rows",
                    bug="TRT-LLM#13151, llama.cpp#26695",
                )

    def _assert_slot(self, forward: ForwardCase, layer: int, slot: int, answer: SlotAnswer, when: str) -> None:
        state, window = (pool[layer, slot].cpu() if pool.numel() else None for pool in self.tensors.memory)
        where = f"{when} slot {slot} of layer {layer} {self._owner(forward, slot)}"
        if answer.state is not None and state is not None:
            assert_state(state, answer.state, self.geometry.state.state_dtype, forward, where)
        if answer.window is not None and window is not None and not torch.equal(window, answer.window):
            at = (window != answer.window).nonzero()[0].tolist()
            raise ContractViolation(
                f"{where} stores another window than the last inputs of the convolution",
                batch=forward,
                got=f"{float(window[tuple(at)]):.6g} at channel {at[0]}, column {at[1]}",
                expected=f"{float(answer.window[tuple(at)]):.6g}",
                poison=poison_in(float(window[tuple(at)])),
                formula="the inputs of the last tokens on the path, oldest first",
                bug="mlx-swift-lm#218",
            )

    @staticmethod
    def _owner(forward: ForwardCase, slot: int) -> str:
        for n, one in enumerate(forward.requests):
            if one.live and slot in (one.pages[0], one.save):
                return f"({'' if slot == one.pages[0] else 'checkpoint of '}request {n})"
        return "(of an earlier round)"

    def host_reads(self, forward: ForwardCase, batch: ForwardBatch, call: Callable[[], None]) -> Iterable[str]:
        """Run `call`, and return the names of torch calls in it that read batch or arena tensors on the host."""
        device = [self.arena[spec.name] for spec in self.arena.specs if not spec.pinned]
        given = [one for name, one in self.tensors.named().items() if not name.startswith("out ")]
        with host_reads([*batch_tensors(batch).values(), *device, *given]) as reads:
            call()
        return reads

    def assert_guards(self, forward: ForwardCase) -> None:
        """Check that no byte before or after any buffer changed."""
        assertions.assert_guards(self.arena, forward)


@open_harness.register(BackendUnderTest)
def _(subject: BackendUnderTest, geometry: Geometry | StateGeometry, num_pages: int) -> Harness | StateHarness:
    if isinstance(geometry, StateGeometry):
        return StateHarness(subject, geometry, num_pages)
    return Harness(subject, geometry, num_pages)
