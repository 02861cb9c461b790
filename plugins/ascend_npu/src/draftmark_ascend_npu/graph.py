"""NPU graphs: capture, task groups, updates and replay.

A captured task of the fused operator contains its lengths. So each call is captured as a task group after an external
event. A replay stops at the event. Meanwhile a second stream replaces the group's call by one with new lists and
records the event. A replay without the update would wait forever::

    capture, per layer and draft step:  event.wait, event.reset, group begin, operator, group end
    replay, on the current stream:      replay(), which stops at the events
    on the update stream:               wait for the previous replay; then per record
                                        update begin, operator with new lists, update end, event.record

With overlap the host has only bounds. Then a program is split after each `write_metadata` into several graphs, so that
the lengths of that step can be copied back between them (`recovery.py`).

Records are keyed by graph key, layer and draft step, never by position.
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
"""torch with torch_npu's `torch.npu`, which torch's type stubs lack."""
Pick = Callable[[HostLists], tuple[list[int], list[int]]]
"""Function from a plan's lists to the two lists that one call takes."""


class RecordKey(NamedTuple):
    """Identifies one captured attention call by its graph, layer, mode and draft step."""

    graph: GraphKey
    layer: int
    """Address of the layer's keys. It never changes, and the backend gets no layer names."""
    step: StepKey


@dataclass(frozen=True)
class Record:
    """Holds one captured attention call. Every replay must give the call new length lists.

    Attributes:
        call: other arguments of the operator; it owns none of the graph's memory.
        workspace: scratch memory of the captured task; the update needs it too. Calls of a graph share one.
        event: external event before the task group.
        handle: handle of the task group.
        plans: the latest planned lists, which a replay reads.
        pick: function from the lists of a plan to the call's two lists.
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
    """Holds the consecutive graphs into which one captured program is split. They share a memory pool.

    Attributes:
        all: the graphs, in the order of replay.
    """

    def __init__(self, pool: Any, stream: Any) -> None:
        self._pool, self._stream = pool, stream
        self.all: list[Any] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the work that is enqueued inside the context. The captured work does not run."""
        _torch.npu.synchronize()
        gc.collect()
        _torch.npu.empty_cache()
        with _torch.npu.stream(self._stream):
            self._begin()
            try:
                yield
            finally:
                self.all[-1].capture_end()

    def split(self) -> None:
        """End the current graph and begin the next one."""
        self.all[-1].capture_end()
        self._begin()

    def _begin(self) -> None:
        self.all.append(_torch.npu.NPUGraph())
        self.all[-1].capture_begin(pool=self._pool)


class Capture:
    """Records the attention calls of a running capture, or of the warm-up before the capture.

    Attributes:
        warming: true in the warm-up, which runs the step so that nothing is initialised during capture.
        points: places at which the program was split, in order.
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
            CaptureError: this layer and step are already captured in the same graph.
        """
        key = RecordKey(self.key, layer, step)
        if key in self.records:
            raise CaptureError(
                f"layer at {layer:#x} attends twice in {step[0].value} step {step[1]} of graph {self.key}; "
                "give each call a KV cache or a draft step of its own"
            )
        lists = plans.latest(step)
        stream = _torch.npu.current_stream()
        workspace = self._shared_workspace(call.workspace(*pick(lists)))
        event = _torch.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        _torch.npu.graph_task_group_begin(stream)
        call.launch(*pick(lists), workspace)
        handle = _torch.npu.graph_task_group_end(stream)
        self.records[key] = Record(call.weak(), workspace, event, handle, plans, pick, requests)

    def split(self, point: Point) -> None:
        """End the current graph and begin another. Between the two, a replay copies the step's lengths to the host."""
        assert self._graphs is not None, "a warm-up is not split"
        self._graphs.split()
        self.points.append(point)

    def _shared_workspace(self, needed: torch.Tensor) -> torch.Tensor:
        """Return the workspace that all calls of a graph share, and grow it if needed. Calls run one after another."""
        if self._workspace is None or self._workspace.nbytes < needed.nbytes:
            self._workspace = needed
        return self._workspace


ACTIVE: ContextVar[Capture | None] = ContextVar("draftmark_ascend_capture", default=None)


@contextmanager
def capturing(key: GraphKey, graphs: Graphs | None = None) -> Iterator[Capture]:
    """Set the current capture, which the backend reads from `ACTIVE`. Without `graphs` this is a warm-up."""
    capture = Capture(key, graphs)
    token = ACTIVE.set(capture)
    try:
        yield capture
    finally:
        ACTIVE.reset(token)


class NpuGraph:
    """Holds one captured step, replays it, and updates its calls with new lengths. See `NpuGraphState`.

    Attributes:
        outputs: return value of the step; its memory is uninitialised until the first replay.
        pool_bytes: growth of the shared pool in bytes.
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
            if "captur" not in _messages(error):
                raise
            raise CaptureError(
                f"the step cannot be captured: {_first_message(error)}; capture it as a RecordedGraph on the CPU, "
                "which names the operator and the remedy"
            ) from error
        self._graphs = graphs.all
        self._records = capture.records
        self._points = capture.points
        self.pool_bytes = max(0, _torch.npu.memory_reserved(device) - reserved)
        self._done.record()

    def replay(self) -> None:
        """Enqueue the program on the current stream and its updates on the update stream.

        The host waits for neither stream, with one exception: if it has only bounds, it waits for the copy of the
        lengths.
        """
        split_steps = {(id(one.plans), one.step) for one in self._points}
        lists = {}
        for key, one in self._records.items():
            bounded = (id(one.plans), key.step) in split_steps
            lists[key] = one.plans.for_replay(key.step, one.requests, bounded)
        if switches.host_wait():
            _torch.npu.current_stream().synchronize()
        # Without this wait an update could record an event before the previous replay resets it, and the record would
        # be lost. The update could also change a task group that still runs.
        self._update.wait_event(self._done)
        late = {key for key, found in lists.items() if not found.exact}
        for graph, before, after in zip(self._graphs, [None, *self._points], [*self._points, None], strict=True):
            graph.replay()
            if before is not None:
                self._update_late(before, late)
            if after is not None and self._keys_of(after, late):
                after.fetch()
        self._update_all({key: found for key, found in lists.items() if key not in late})
        self._done.record()

    def _keys_of(self, point: Point, keys: set[RecordKey]) -> list[RecordKey]:
        """Return which of these keys belong to calls that need the lengths copied at `point`."""
        return [key for key in keys if key.step == point.step and self._records[key].plans is point.plans]

    def _update_late(self, point: Point, late: set[RecordKey]) -> None:
        """Wait for the lengths that are copied at `point`, then update the calls that need them."""
        if mine := self._keys_of(point, late):
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
    """Captures and replays NPU graphs by key, in one memory pool; implements `GraphState`.

    Capture first runs the step once on a side stream, as `draftmark.graphs.CudaGraphState` does. The capture itself
    executes nothing. Capture the largest batch first, so that smaller graphs fit into memory that it left free.

    Args:
        device: the NPU; `replay` uses its current stream.

    Raises:
        BackendError: the runtime or the driver cannot replay a graph with new lengths.
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
        """Capture a step under a key. See `GraphState.capture`."""
        if ACTIVE.get() is not None:
            raise CaptureError("a graph cannot be captured inside another capture; capture them one after the other")
        self._key = key
        return super().capture(key, step)

    def _record(self, step: Callable[[], Any]) -> NpuGraph:
        if self._key is None:
            raise GraphError("a graph is captured without a key; call capture(key, step)")
        with _torch.npu.device(self._device):
            self._warm_up(self._key, step)
            return NpuGraph(self._key, step, self._pool, self._stream, self._update)

    def _warm_up(self, key: GraphKey, step: Callable[[], Any]) -> None:
        self._stream.wait_stream(_torch.npu.current_stream())
        with _torch.npu.stream(self._stream), capturing(key):
            step()
        _torch.npu.current_stream().wait_stream(self._stream)


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and the errors before it (`__context__`). The error that was raised first is last."""
    found: list[BaseException] = [error]
    while (cause := found[-1].__context__) is not None:
        found.append(cause)
    return found


def _messages(error: BaseException) -> str:
    return " ".join(str(one) for one in _chain(error)).lower()


def _first_message(error: BaseException) -> str:
    """Return one line of the error that was raised first: the last line about a capture, else the first line."""
    lines = [line.strip() for line in str(_chain(error)[-1]).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "captur" in line), lines[0] if lines else "no message")
