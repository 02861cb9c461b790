"""The device side of a round, step by step: run as Python, or captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from draftmark.graphs import GraphKey, GraphState

Outputs = TypeVar("Outputs")


class GraphRunner:
    """Runs a step eagerly where there is no graph state, and replays its recording where there is one.

    Args:
        graphs: the backend's graph state, or None.
    """

    def __init__(self, graphs: GraphState | None) -> None:
        self.graphs = graphs

    def capture(self, key: GraphKey, step: Callable[[], Outputs]) -> None:
        """Capture `step`; what it returns belongs to the graph."""
        assert self.graphs is not None, "only a graph state captures"
        self.graphs.capture(key, step)

    def run(self, key: GraphKey, step: Callable[[], Outputs]) -> Outputs:
        """The step's effects and outputs, which are valid until the next run of the same key."""
        if self.graphs is None:
            return step()
        outputs: Outputs = self.graphs.replay(key)
        return outputs
