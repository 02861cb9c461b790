"""NPU graphs: the only file that names them.

The fused operator's lengths are baked into its captured task, so each such call is captured as a task group behind an
external event. A replay stops at the event; meanwhile a second stream puts the call with fresh lists in the group's
place and records the event. Without the update the replay would wait for ever, by design::

    capture, per layer and draft step:  event.wait, event.reset, group begin, operator, group end
    replay, on the current stream:      replay(), which stops at the events
    on the update stream:               wait for the previous replay; then per record
                                        update begin, operator with new lists, update end, event.record

Records are keyed by graph key, layer and draft step; nothing is matched by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftmark import CaptureError, GraphError
from draftmark.runtime import GraphKey, KeyedGraphState

from .lengths import HostLists, Plans, StepKey
from .ops import PagedAttention

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


class Capture:
    """A capture under way, or the warm-up before it.

    Attributes:
        warming: the step runs for real, so that nothing is initialised while the stream captures.
    """

    def __init__(self, key: GraphKey, warming: bool) -> None:
        self.key = key
        self.warming = warming
        self.records: dict[RecordKey, Record] = {}
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

    def _enough(self, needed: torch.Tensor) -> torch.Tensor:
        """One workspace for all calls of a graph, which run one after the other; the first one that is large enough."""
        if self._workspace is None or self._workspace.nbytes < needed.nbytes:
            self._workspace = needed
        return self._workspace


ACTIVE: ContextVar[Capture | None] = ContextVar("draftmark_ascend_capture", default=None)


@contextmanager
def capturing(key: GraphKey, warming: bool) -> Iterator[Capture]:
    """Let the backend's `attend` find the capture that it runs in."""
    capture = Capture(key, warming)
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
        self._graph = _torch.npu.NPUGraph()
        self._update = update
        self._done = _torch.npu.Event()
        device = _torch.npu.current_device()
        try:
            with _torch.npu.graph(self._graph, pool=pool, stream=stream), capturing(key, warming=False) as capture:
                reserved = _torch.npu.memory_reserved(device)
                self.outputs = step()
        except RuntimeError as error:
            if "captur" not in _words(error):
                raise
            raise CaptureError(
                f"the step cannot be captured: {_root(error)}; capture it as a RecordedGraph on the CPU, which names "
                "the operator and the remedy"
            ) from error
        self._records = capture.records
        self.pool_bytes = max(0, _torch.npu.memory_reserved(device) - reserved)
        self._done.record()

    def replay(self) -> None:
        """Enqueue the graph on the current stream and its updates on the update stream; waits for neither."""
        lists = {key: one.plans.for_replay(key.step, one.requests) for key, one in self._records.items()}
        # An event recorded before the previous replay has reset it would be lost, and its group changed under it.
        self._update.wait_event(self._done)
        self._graph.replay()
        with _torch.npu.stream(self._update):
            self._update_all(lists)
        self._done.record()

    def _update_all(self, lists: dict[RecordKey, HostLists]) -> None:
        for key, record in self._records.items():
            _torch.npu.graph_task_update_begin(self._update, record.handle)
            record.call.launch(*record.pick(lists[key]), record.workspace)
            _torch.npu.graph_task_update_end(self._update)
            record.event.record(self._update)


class NpuGraphState(KeyedGraphState):
    """`GraphState` made of NPU graphs, all in one memory pool.

    Capture first runs the step once for real on a side stream, as `draftmark.graphs.CudaGraphState` does; the capture
    proper executes nothing. Capture the largest batch first, so that smaller ones fit into what it left free.

    Args:
        device: the NPU; `replay` uses its current stream.
    """

    def __init__(self, device: torch.device | str = "npu") -> None:
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
            raise CaptureError("a graph cannot be captured inside another's capture; capture them one after the other")
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
        with _torch.npu.stream(self._stream), capturing(key, warming=True):
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
