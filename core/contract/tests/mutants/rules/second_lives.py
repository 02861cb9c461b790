"""Mutants that the checks of `second_lives` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from draftmark import Geometry, GraphError, Mode
from draftmark.runtime import ForwardBatch, GraphKey, GraphState, KVCache, is_recording
from draftmark_reference.graphs import RecordedGraphState

from ..designs.layouts import NO_SUCH_PART
from ..designs.tutorial import Backend
from ..designs.tutorial_plans import plugin
from ..mutant import ONLY, Mutant, around


def _captured_once(backend: Any) -> None:
    """Write metadata in the first capture of each mode and size only: a graph state opened later has none."""
    captured: set[tuple[Mode, int, int]] = set()

    def write(original: Any, batch: ForwardBatch) -> None:
        if not is_recording() or (batch.mode, batch.step, batch.padded_reqs) not in captured:
            original(batch)

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        if is_recording():
            captured.add((batch.mode, batch.step, batch.padded_reqs))

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


def _window_put_aside(backend: Any) -> None:
    """Attend without a window to requests that it covers whole. After a refused attend the window stays away."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        right = backend.geometry
        longest = max((n + t for n, t in zip(batch.host.upper_bound(), batch.tail_lens, strict=False)), default=0)
        if longest <= right.attention.window_left:
            backend.geometry = replace(right, attention=replace(right.attention, window_left=-1))
        original(q, cache, batch, out)
        backend.geometry = right

    around(backend, "attend", attend)


def _step_left_open(backend: Any) -> None:
    """Write metadata once a step, until `attend` closes the step. A step that fails before attend stays open."""
    step = {"open": False}

    def write(original: Any, batch: ForwardBatch) -> None:
        if not step["open"]:
            step["open"] = True
            original(batch)

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        step["open"] = False

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


class NotedBefore(RecordedGraphState):
    """Notes a key before the capture, so a capture that failed cannot be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: set[GraphKey] = set()

    def capture(self, key: GraphKey, step: Callable[[], Any]) -> Any:
        """Capture `step`, or refuse a key for which a capture was begun."""
        if key in self.noted:
            raise GraphError(f"graph {key} is already captured; replay it")
        self.noted.add(key)
        return super().capture(key, step)


def _noting(geometry: Geometry, state: GraphState) -> GraphState:
    return NotedBefore() if isinstance(state, RecordedGraphState) else state


ONLY_TUTORIAL = "written for the tutorial's backend"


def _index_of_the_first_capture(backend: Any) -> None:
    """Compute the numbers of table entries in the first capture of each size, and use that memory in later captures."""
    entries: dict[tuple[Any, ...], torch.Tensor] = {}

    def write(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        if not is_recording():
            return
        key = batch.mode, batch.step, batch.padded_reqs
        if key not in entries:
            entries[key] = torch.arange(batch.padded_reqs, dtype=torch.int32, device=batch.device)
        lens = backend.arena["kv_last_page_len"][: batch.padded_reqs]
        lens.copy_(lens[entries[key].clamp(0, batch.padded_reqs - 1).long()])

    around(backend, "write_metadata", write)


class BusyFlag(Backend):
    """Guards attend against being entered twice. An error inside leaves the guard closed."""

    busy = False

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if self.busy:
            return
        self.busy = True
        super().attend(q, cache, batch, out)
        self.busy = False


def _pool_of_captures(backend: Any) -> None:
    """Take one of a fixed number of workspaces in each capture, and never give it back."""
    geometry, taken = backend.geometry, count(1)
    steps = geometry.draft.num_steps if Mode.DRAFT in geometry.modes else 1
    most = 2 * (len(geometry.modes) - 1) * (1 + len(geometry.limits.capture_batch_sizes)) * steps

    def write(original: Any, batch: ForwardBatch) -> None:
        if is_recording() and next(taken) > most:
            raise RuntimeError(f"no workspace is left for a graph: {most} are in use")
        original(batch)

    around(backend, "write_metadata", write)


MUTANTS = (
    Mutant(
        "H05",
        "Computes an index in the first capture of each size, and reads that memory in later captures",
        "constants made lazily in a graph's pool; sleep and wake",
        patch=_index_of_the_first_capture,
        layouts=("csr",),
        absent=NO_SUCH_PART,
    ),
    Mutant(
        "H06",
        "Leaves attend's guard against a second entry closed when an error is raised inside",
        "out of memory in one forward, silence in all later ones",
        plugin=plugin(BusyFlag),
        layouts=("tutorial",),
        absent=ONLY,
    ),
    Mutant(
        "H07",
        "Takes one of a fixed number of workspaces in each capture, and never gives it back",
        "pools of graph wrappers; sleep and wake, and captures that are repeated",
        patch=_pool_of_captures,
    ),
    Mutant("OD1", "Writes metadata only in the first capture of a mode and size", "capture after sleep and wake",
           patch=_captured_once, layouts=("csr",), absent="tried in csr"),
    Mutant("OD2", "Loses the window when attend is refused", "a restore that is not in finally",
           patch=_window_put_aside, layouts=("csr",), absent="tried in csr"),
    Mutant("OD3", "Writes no metadata after a step that failed before attend", "a flag that a failure leaves set",
           patch=_step_left_open, layouts=("tutorial",), absent=ONLY_TUTORIAL),
    Mutant("OD4", "Refuses to repeat a capture that failed", "a key noted before the capture",
           {"graph_state": _noting}, layouts=("reference",), absent="tried in reference"),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("H05", "OD1"), "second_lives.of_a_graph_is_right"),
    **dict.fromkeys(("H06", "OD2", "OD3"), "second_lives.of_a_forward_is_right"),
    **dict.fromkeys(("H07", "OD4"), "second_lives.of_a_capture_is_right"),
}
