"""Captures and replays graphs of an engine's layer, with the methods of `harness.graph_harness.GraphHarness`."""

from __future__ import annotations

from typing import Any

import torch

from draftmark.graphs import GraphKey, Program

from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import captured, programs_of, replays
from ..check import Refused
from ..harness.opening import open_graphs
from .driver import Capturable
from .harness import EngineHarness
from .step import Step, step_of


class EngineGraphs:
    """Captures graphs of a layer and replays them. A step is padded to the size of its graph.

    Attributes:
        harness: the layer.
    """

    def __init__(self, harness: EngineHarness) -> None:
        self.harness = harness
        self._graphs: dict[GraphKey, Any] = {}

    def fresh(self) -> EngineGraphs:
        """Return a harness that opens this layer again, without captured graphs."""
        return EngineGraphs(self.harness.fresh())

    @property
    def programs(self) -> list[Program]:
        """All programs of the geometry.

        Raises:
            Refused: the backend does not declare graphs of each of them.
        """
        found = programs_of(self.harness.geometry)
        if not all(self._serves(one) for one in found):
            raise self._refusal(*found)
        return found

    def rounds(self, program: Program) -> list[tuple[bool, ForwardCase]]:
        """Return the rounds of `graph_rounds.replays`; one short request stands for a batch without requests."""
        geometry = self.harness.geometry
        return [
            (poison, one if one.live else captured(geometry, program, len(one.requests), short=True))
            for poison, one in replays(geometry, program)
        ]

    def capture(self, key: GraphKey, short: bool = False) -> None:
        """Capture a size as the engine does at startup: on a dummy batch. Its output is dropped.

        Raises:
            Refused: the backend declares no such graph.
        """
        if not self._serves(key.program):
            raise self._refusal(key.program)
        rows = self.harness.geometry.draft.num_draft_tokens if key.program is Program.VERIFY else 1
        self._graphs[key] = self.harness.driver.capture(rows, key.batch_size)

    def capture_checked(self, key: GraphKey) -> Step:
        """Capture a size, and load a batch that fills it."""
        self.capture(key)
        return self.load(captured(self.harness.geometry, key.program, key.batch_size))

    def load(self, forward: ForwardCase, seed: int = 0, host: str = "exact") -> Step:
        """Fill rows and KV for a batch. Its padded requests follow the live ones."""
        step = step_of(forward, self.harness.caps.trees, padding=len(forward.requests) - forward.live)
        return self.harness.load(step, host, seed)

    def load_replay(self, forward: ForwardCase, number: int, poison: bool = False) -> Step:
        """Fill rows and KV for replay `number`. The number selects the kind of host lengths."""
        kinds = ("exact", "upper_bound", "unknown", "tight_bound")
        return self.load(forward, number, kinds[number % len(kinds)])

    def assert_replay(self, program: Program, loaded: Step, what: str = "") -> None:
        """Replay the graph of a loaded batch, and check the result as `EngineHarness.assert_forward` does."""
        key = GraphKey(program, len(loaded.forward.requests) + loaded.padding)

        def replay(step: Step, *rows: torch.Tensor) -> torch.Tensor:
            return self.harness.driver.replay(self._graphs[key], step, *rows)

        self.harness.assert_forward(loaded, loaded, f"the replay of {key} {what}".rstrip(), replay)

    def clear_outputs(self) -> None:
        """Do nothing: a replay returns its output."""

    def _serves(self, program: Program) -> bool:
        needed = Capturable.UNIFORM if program is Program.VERIFY else Capturable.ONE_ROW
        return self.harness.driver.capturable >= needed

    def _refusal(self, *programs: Program) -> Refused:
        names = ", ".join(one.value for one in programs)
        return Refused(f"full graphs of {names}: the backend declares {self.harness.driver.capturable.name}")


@open_graphs.register(EngineHarness)
def _(harness: EngineHarness) -> EngineGraphs:
    return EngineGraphs(harness)
