"""Capture once, replay by key: the part that every device's graph state shares. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import GraphError
from .state import GraphKey, Outputs


class Recording(Protocol):
    """One captured step, on whatever device."""

    outputs: Any
    """What the step returned; every replay overwrites its tensors in place."""
    pool_bytes: int
    """Bytes this recording added to what its state holds."""

    def replay(self) -> None:
        """Run the step again on the same storages."""
        ...


class KeyedGraphState(ABC):
    """A `GraphState` but for `_record`, which says how the device captures one step.

    A vendor plugin (an NPU's, say) derives from it, so that misuse reads the same on every device.
    """

    def __init__(self) -> None:
        self._recordings: dict[GraphKey, Recording] = {}

    @abstractmethod
    def _record(self, step: Callable[[], Any]) -> Recording:
        """Capture `step`; on any error leave nothing behind."""

    def capture(self, key: GraphKey, step: Callable[[], Outputs]) -> Outputs:
        """See `GraphState.capture`."""
        if key in self._recordings:
            raise GraphError(
                f"graph {key} is already captured; replay it, or open a fresh graph state to capture it anew"
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
        """See `GraphState.replay`."""
        recording = self._recordings.get(key)
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
        """See `GraphState.keys`."""
        return tuple(sorted(self._recordings))

    @property
    def pool_bytes(self) -> int:
        """See `GraphState.pool_bytes`."""
        return sum(recording.pool_bytes for recording in self._recordings.values())
