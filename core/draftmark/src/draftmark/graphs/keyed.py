"""Base class of graph states: capture once, replay by key. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import GraphError
from .state import GraphKey, Outputs


class Recording(Protocol):
    """Interface of a captured step, on any device."""

    outputs: Any
    """Return value of the step; every replay overwrites its tensors in place."""
    pool_bytes: int
    """Bytes that this recording adds to the memory of its state."""

    def replay(self) -> None:
        """Run the step again with the same storages."""
        ...


class KeyedGraphState(ABC):
    """Base class of graph states; a subclass implements `_record`, which captures one step on its device.

    A vendor plugin (e.g. for an NPU) derives from this class, so that errors are equal on every device.
    """

    def __init__(self) -> None:
        self._recordings: dict[GraphKey, Recording] = {}

    @abstractmethod
    def _record(self, step: Callable[[], Any]) -> Recording:
        """Capture `step`; on any error release everything that the capture allocated."""

    def capture(self, key: GraphKey, step: Callable[[], Outputs]) -> Outputs:
        """Capture `step` under `key` and return its outputs; see `GraphState.capture`."""
        if not isinstance(key, GraphKey) or not callable(step):
            raise GraphError(f"capture got {key!r} and {step!r}, but it needs a GraphKey and a step; write GraphKey(…)")
        if key in self._recordings:
            raise GraphError(
                f"graph {key} is already captured; replay it, or open a new graph state to capture it again"
            )
        try:
            recording = self._record(step)
        except Exception as error:
            error.add_note(f"while capturing graph {key}")
            raise
        self._recordings[key] = recording
        outputs: Outputs = recording.outputs
        return outputs

    def replay(self, key: GraphKey) -> Any:
        """Run the graph of `key` and return its outputs; see `GraphState.replay`."""
        recording = self._recordings.get(key) if isinstance(key, GraphKey) else None
        if recording is None:
            captured = ", ".join(map(str, self.keys)) or "none"
            raise GraphError(
                f"graph {key} was never captured (captured: {captured}); capture it at start-up, or pad the batch to "
                "a captured size with padded_batch_size"
            )
        recording.replay()
        return recording.outputs

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every captured key, in order; see `GraphState.keys`."""
        return tuple(sorted(self._recordings))

    @property
    def pool_bytes(self) -> int:
        """Bytes that all captures keep allocated; see `GraphState.pool_bytes`."""
        return sum(recording.pool_bytes for recording in self._recordings.values())
