"""Runs forwards of several open geometries by turns: their calls interleave, eagerly or in one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draftmark.batch import ForwardBatch
from draftmark.geometry import Geometry
from draftmark.graphs import GraphKey

from ..backend_under_test import BackendUnderTest
from ..cases.forwards import ForwardCase
from .expected import Expected
from .graph_harness import no_sync
from .harness import Harness


@dataclass
class Turn:
    """Holds one geometry's forward of a round: its batch, its expected result, and its calls."""

    harness: Harness
    forward: ForwardCase
    batch: ForwardBatch
    expected: Expected
    calls: list[Callable[[], None]]


class TurnsHarness:
    """Opens several geometries, and runs one forward of each in every round.

    Attributes:
        harnesses: one per geometry.
    """

    def __init__(self, subject: BackendUnderTest, geometries: Sequence[Geometry], num_pages: int) -> None:
        self.subject = subject
        self.harnesses = [Harness(subject, one, num_pages) for one in geometries]
        self._state = subject.graph_state(self.harnesses[0].geometry)

    @property
    def capture_host(self) -> str:
        """Kind of host lengths at capture: exact if a backend needs them, else unknown."""
        return "unknown" if all(harness.bounded for harness in self.harnesses) else "exact"

    def load(self, forwards: Sequence[ForwardCase], seed: int, host: str | None = None) -> list[Turn]:
        """Fill each geometry's tensors with its forward, and return the turns of a round.

        Equal requests in two forwards are one batch: both geometries receive the first one's batch object.

        Args:
            host: kind of host lengths; by default the least exact kind that each backend accepts.
        """
        turns: list[Turn] = []
        for number, (harness, forward) in enumerate(zip(self.harnesses, forwards, strict=True)):
            placed = harness.place(forward)
            batch = harness.load(placed, host, seed + number)
            for other in turns:
                if other.forward == replace(placed, geometry=other.forward.geometry):
                    batch = other.batch
            calls = list(harness.calls(placed, batch).values())
            turns.append(Turn(harness, placed, batch, harness.expected(placed), calls))
        return turns

    def run(self, turns: Sequence[Turn], order: Sequence[int]) -> None:
        """Make every call of a round eagerly. Entry i of `order` is the geometry of the i-th call."""
        left = [list(turn.calls) for turn in turns]
        for n in order:
            left[n].pop(0)()
        self._interpret(turns)

    def plan(self, turns: Sequence[Turn]) -> None:
        """Make the first call of every turn: plan."""
        for turn in turns:
            turn.calls[0]()

    def capture(self, key: GraphKey, turns: Sequence[Turn], order: Sequence[int]) -> None:
        """Capture the calls of a round after plan as one graph, in this order. They first run once eagerly."""

        def step() -> None:
            left = [turn.calls[1:] for turn in turns]
            for n in order:
                left[n].pop(0)()

        self.plan(turns)
        step()
        self.plan(turns)
        with no_sync(self.subject.device):
            self._state.capture(key, step)

    def replay(self, key: GraphKey, turns: Sequence[Turn]) -> None:
        """Plan every turn, and replay the graph of a round."""
        self.plan(turns)
        with no_sync(self.subject.device):
            self._state.replay(key)
        self._interpret(turns)

    def assert_turns(self, turns: Sequence[Turn], what: str) -> None:
        """Check metadata, cache, output and guard words of each geometry after a round."""
        for number, turn in enumerate(turns):
            what_of = f"the output of geometry {number} {what}"
            turn.harness.subject.current = turn.forward
            turn.harness.assert_step(turn.forward, turn.batch, turn.expected, what_of)

    def _interpret(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if not turn.harness.kernels:
                turn.harness.interpret(turn.forward, turn.batch, turn.harness.tensors, turn.harness.buffers())
            turn.harness.subject.attended = turn.harness.subject.attended or turn.harness.kernels
