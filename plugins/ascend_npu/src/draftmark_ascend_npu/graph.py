"""NPU graphs: the only file that names them.

The fused operator's lengths are baked into its captured task, so each such call is captured as a task group behind an
external event. A replay stops at the event; meanwhile a second stream puts the call with fresh lists in the group's
place and records the event. Without the update the replay would wait for ever, by design::

    capture, per layer and draft step:  event.wait, event.reset, group begin, operator, group end
    replay, on the current stream:      replay(), which stops at the events
    on the update stream:               wait for the previous replay; then per record
                                        update begin, operator with new lists, update end, event.record

Where the host knows bounds only (overlap), a program is cut behind each `write_metadata` into several graphs, so that
the lengths of that step can come back between them (`recovery.py`).

Records are keyed by graph key, layer and draft step; nothing is matched by position.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftmark import CaptureError, GraphError
from draftmark.runtime import GraphKey, KeyedGraphState

from . import switches
from .device import require_graphs
from .lengths import HostLists, Plans, StepKey
from .ops import PagedAttention
from .recovery import Point

_torch: Any = torch
"""torch_npu adds torch.npu, of which torch's own types know nothing."""
Pick = Callable[[HostLists], tuple[list[int], list[int]]]
"""From a plan's lists to the two that one call takes."""


class RecordKey(NamedTuple):
    """Which call of which graph."""

    graph: GraphKey
    layer: int
    """Address of the layer's keys, which never moves: the step path knows no layer names."""
    step: StepKey


@dataclass(frozen=True)
class Record:
    """One captured call whose lists must be brought anew before every replay.

    Attributes:
        call: the operator's other arguments; holds none of the graph's memory.
        workspace: scratch memory of the captured task, kept because the update names it too; calls of a graph share it.
        requests: padded requests of the capture.
    """

    call: PagedAttention
    workspace: torch.Tensor
    event: Any
    handle: Any
    plans: Plans
    pick: Pick
    requests: int


class Graphs:
    """One program as graphs that follow one another, all in one pool.

    Attributes:
        all: the graphs, in the order of their replay.
    """

    def __init__(self, pool: Any, stream: Any) -> None:
        self._pool, self._stream = pool, stream
        self.all: list[Any] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what is enqueued inside; nothing of it runs."""
        _torch.npu.synchronize()
        gc.collect()
        _torch.npu.empty_cache()
        with _torch.npu.stream(self._stream):
            self._begin()
            try:
                yield
            finally:
                self.all[-1].capture_end()

    def cut(self) -> None:
        """What was captured so far is a graph; what follows is another."""
        self.all[-1].capture_end()
        self._begin()

    def _begin(self) -> None:
        self.all.append(_torch.npu.NPUGraph())
        self.all[-1].capture_begin(pool=self._pool)


class Capture:
    """A capture under way, or the warm-up before it.

    Attributes:
        warming: the step runs for real, so that nothing is initialised while the stream captures.
        points: where the program was cut, in order.
    """

    def __init__(self, key: GraphKey, graphs: Graphs | None = None) -> None:
        self.key = key
        self.warming = graphs is None
        self._graphs = graphs
        self.records: dict[RecordKey, Record] = {}
        self.points: list[Point] = []
        self._workspace: torch.Tensor | None = None

    def add(self, layer: int, step: StepKey, call: PagedAttention, plans: Plans, pick: Pick, requests: int) -> None:
        """Capture `call` as an updatable task group.

        Raises:
            CaptureError: this layer and step were captured before in the same graph.
        """
        key = RecordKey(self.key, layer, step)
        if key in self.records:
            raise CaptureError(
                f"layer at {layer:#x} attends twice in {step[0].value} step {step[1]} of graph {self.key}; "
                "give each call a cache, or a draft step, of its own"
            )
        lists = plans.latest(step)
        stream = _torch.npu.current_stream()
        workspace = self._enough(call.workspace(*pick(lists)))
        event = _torch.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        _torch.npu.graph_task_group_begin(stream)
        call.launch(*pick(lists), workspace)
        handle = _torch.npu.graph_task_group_end(stream)
        self.records[key] = Record(call.weak(), workspace, event, handle, plans, pick, requests)

    def cut(self, point: Point) -> None:
        """End the graph here and begin another: the lengths of a step are on the device."""
        assert self._graphs is not None, "a warm-up is not cut"
        self._graphs.cut()
        self.points.append(point)

    def _enough(self, needed: torch.Tensor) -> torch.Tensor:
        """One workspace for all calls of a graph, which run one after the other; the first one that is large enough."""
        if self._workspace is None or self._workspace.nbytes < needed.nbytes:
            self._workspace = needed
        return self._workspace


ACTIVE: ContextVar[Capture | None] = ContextVar("draftmark_ascend_capture", default=None)


@contextmanager
def capturing(key: GraphKey, graphs: Graphs | None = None) -> Iterator[Capture]:
    """Let the backend find the capture that it runs in; without `graphs` it is the warm-up."""
    capture = Capture(key, graphs)
    token = ACTIVE.set(capture)
    try:
        yield capture
    finally:
        ACTIVE.reset(token)


class NpuGraph:
    """One captured step; see `NpuGraphState`.

    Attributes:
        outputs: what the step returned; its memory is not initialised until the first replay.
        pool_bytes: bytes by which the shared pool grew.
    """

    def __init__(self, key: GraphKey, step: Callable[[], Any], pool: Any, stream: Any, update: Any) -> None:
        self._update = update
        self._done = _torch.npu.Event()
        device = _torch.npu.current_device()
        graphs = Graphs(pool, stream)
        try:
            with graphs.capturing(), capturing(key, graphs) as capture:
                reserved = _torch.npu.memory_reserved(device)
                self.outputs = step()
        except RuntimeError as error:
            if "captur" not in _words(error):
                raise
            raise CaptureError(
                f"the step cannot be captured: {_root(error)}; capture it as a RecordedGraph on the CPU, which names "
                "the operator and the remedy"
            ) from error
        self._graphs = graphs.all
        self._records = capture.records
        self._points = capture.points
        self.pool_bytes = max(0, _torch.npu.memory_reserved(device) - reserved)
        self._done.record()

    def replay(self) -> None:
        """Enqueue the program on the current stream and its updates on the update stream.

        Waits for neither, unless the host knows bounds only: then for the device to say what its lengths are.
        """
        asked = {(id(one.plans), one.step) for one in self._points}
        lists = {}
        for key, one in self._records.items():
            bounded = (id(one.plans), key.step) in asked
            lists[key] = one.plans.for_replay(key.step, one.requests, bounded)
        if switches.host_wait():
            _torch.npu.current_stream().synchronize()
        # An event recorded before the previous replay has reset it would be lost, and its group changed under it.
        self._update.wait_event(self._done)
        late = {key for key, found in lists.items() if not found.exact}
        for graph, before, behind in zip(self._graphs, [None, *self._points], [*self._points, None], strict=True):
            graph.replay()
            if before is not None:
                self._bring(before, late)
            if behind is not None and self._of(behind, late):
                behind.ask()
        self._update_all({key: found for key, found in lists.items() if key not in late})
        self._done.record()

    def _of(self, point: Point, keys: set[RecordKey]) -> list[RecordKey]:
        """The records whose lengths are those of a point."""
        return [key for key in keys if key.step == point.step and self._records[key].plans is point.plans]

    def _bring(self, point: Point, late: set[RecordKey]) -> None:
        """Update the calls that wait for a point's lengths, which are on their way."""
        if mine := self._of(point, late):
            found = point.recovery.lists(point.step)
            self._update_all(dict.fromkeys(mine, found))

    def _update_all(self, lists: dict[RecordKey, HostLists]) -> None:
        with _torch.npu.stream(self._update):
            for key, found in lists.items():
                record = self._records[key]
                _torch.npu.graph_task_update_begin(self._update, record.handle)
                record.call.launch(*record.pick(found), record.workspace)
                _torch.npu.graph_task_update_end(self._update)
                record.event.record(self._update)


class NpuGraphState(KeyedGraphState):
    """`GraphState` made of NPU graphs, all in one memory pool.

    Capture first runs the step once for real on a side stream, as `draftmark.graphs.CudaGraphState` does; the capture
    proper executes nothing. Capture the largest batch first, so that smaller ones fit into what it left free.

    Args:
        device: the NPU; `replay` uses its current stream.

    Raises:
        BackendError: a runtime or a driver on which a replay could not have lengths of its own.
    """

    def __init__(self, device: torch.device | str = "npu") -> None:
        require_graphs()
        super().__init__()
        self._device = torch.device(device)
        with _torch.npu.device(self._device):
            self._stream = _torch.npu.Stream()
            self._update = _torch.npu.Stream()
            self._pool = _torch.npu.graph_pool_handle()
        self._key: GraphKey | None = None

    def capture(self, key: GraphKey, step: Callable[[], Any]) -> Any:
        """See `GraphState.capture`."""
        if ACTIVE.get() is not None:
            raise CaptureError("a graph cannot be captured inside another capture; capture them one after the other")
        self._key = key
        return super().capture(key, step)

    def _record(self, step: Callable[[], Any]) -> NpuGraph:
        if self._key is None:
            raise GraphError("a graph is captured under a key; call capture(key, step)")
        with _torch.npu.device(self._device):
            self._warm_up(self._key, step)
            return NpuGraph(self._key, step, self._pool, self._stream, self._update)

    def _warm_up(self, key: GraphKey, step: Callable[[], Any]) -> None:
        self._stream.wait_stream(_torch.npu.current_stream())
        with _torch.npu.stream(self._stream), capturing(key):
            step()
        _torch.npu.current_stream().wait_stream(self._stream)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and those it was raised from or after, the first one last."""
    found: list[BaseException] = [error]
    while (cause := found[-1].__context__) is not None:
        found.append(cause)
    return found


def _words(error: BaseException) -> str:
    return " ".join(str(one) for one in _chain(error)).lower()


def _root(error: BaseException) -> str:
    """What the first error says, in a line. torch_npu puts the runtime's own words at the end."""
    lines = [line.strip() for line in str(_chain(error)[-1]).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "captur" in line), lines[0] if lines else "no message")
