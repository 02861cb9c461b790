"""Mutants that checks of `graphs` kill: outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from draftmark import Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, GraphKey, GraphState, KeyedGraphState, Program
from draftmark_reference.graphs import RecordedGraph

from ...designs.declared import graph_states
from ...designs.layouts import of_tutorial
from ...designs.tutorial_plans import Mapped, plugin
from ...mutant import Mutant


def _quiet(state: Any) -> None:
    original = state.replay
    state.replay = lambda key: original(key) if key in state.keys else None


def _twice(state: Any) -> None:
    original = state.capture

    def capture(key: Any, step: Any) -> Any:
        state._recordings.pop(key, None)
        return original(key, step)

    state.capture = capture


def _typed(**values: Any) -> dict[str, Any]:
    """Return a `graph_state` hook for a state with properties that return wrong values."""

    def change(state: Any) -> None:
        state.__class__ = type("Lies", (type(state),), {k: property(lambda self, v=v: v) for k, v in values.items()})

    return graph_states(change)


def _filed_by_rows(geometry: Geometry, state: GraphState) -> GraphState:
    """Look up captured graphs by their number of rows, so DECODE and DRAFT graphs of equal rows are confused."""
    each = {Program.DECODE: 1, Program.DRAFT: geometry.draft.topk}
    files: dict[int, GraphKey] = {}
    outputs: dict[GraphKey, Any] = {}
    capture, replay = state.capture, state.replay

    def rows(key: GraphKey) -> int:
        return int(each.get(key.program, geometry.draft.num_draft_tokens) * key.batch_size)

    def captured(key: GraphKey, step: Any) -> Any:
        outputs[key] = capture(key, step)
        files[rows(key)] = key
        return outputs[key]

    def replayed(key: GraphKey) -> Any:
        replay(files.get(rows(key), key))
        return outputs[key]

    state.capture, state.replay = captured, replayed  # type: ignore[method-assign]
    return state


class WrittenOnce(Mapped):
    """Writes metadata once per plan, so a capture after a warm-up run contains no metadata kernels."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.written: set[tuple[Mode, int]] = set()

    def plan(self, batch: ForwardBatch) -> None:
        self.written.discard((batch.mode, batch.step))

    def write_metadata(self, batch: ForwardBatch) -> None:
        if (batch.mode, batch.step) not in self.written:
            self.written.add((batch.mode, batch.step))
            super().write_metadata(batch)


OUTPUTS: dict[tuple[object, ...], torch.Tensor] = {}


class PooledRecording:
    """A captured graph that keeps its outputs in a process-wide pool, shared by all graphs of equal output shapes."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.graph = RecordedGraph(step)
        self.pool_bytes = self.graph.pool_bytes
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def pooled(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            key = (len(seen), tuple(tensor.shape), tensor.dtype)
            seen.append((OUTPUTS.setdefault(key, torch.zeros_like(tensor)), tensor))
            return seen[-1][0]

        self.outputs = tree_map(pooled, self.graph.outputs)
        self.pairs = seen

    def replay(self) -> None:
        self.graph.replay()
        for mine, tensor in self.pairs:
            mine.copy_(tensor)


class PooledOutputs(KeyedGraphState):
    """A graph state that records with `PooledRecording`."""

    def _record(self, step: Callable[[], Any]) -> PooledRecording:
        return PooledRecording(step)


CAPACITY = 16


class EvictedRecording:
    """A graph that can be evicted and captured again, but still returns the outputs of its first capture."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.graph = step, RecordedGraph(step)
        self.outputs, self.pool_bytes = self.graph.outputs, self.graph.pool_bytes

    def replay(self) -> None:
        self.graph = self.graph or RecordedGraph(self.step)
        self.graph.replay()


class BoundedGraphs(KeyedGraphState):
    """Keeps at most 16 graphs: evicts the oldest, and captures it again at its next replay."""

    def _record(self, step: Callable[[], Any]) -> EvictedRecording:
        alive = [one for one in self._recordings.values() if one.graph is not None]
        if len(alive) >= CAPACITY:
            alive[0].graph = None
        return EvictedRecording(step)


class SharedPool(KeyedGraphState):
    """Frees the memory of all graphs when any graph state is dropped; later replays have empty outputs."""

    dropped = 0

    def __init__(self) -> None:
        super().__init__()
        self._born = SharedPool.dropped
        weakref.finalize(self, SharedPool._drop)

    @classmethod
    def _drop(cls) -> None:
        cls.dropped += 1

    def _record(self, step: Callable[[], Any]) -> RecordedGraph:
        self._born = SharedPool.dropped
        return RecordedGraph(step)

    def replay(self, key: GraphKey) -> Any:
        """Replay a graph, and empty its outputs if a graph state was dropped since the last capture."""
        outputs = super().replay(key)
        if SharedPool.dropped != self._born:
            tree_map(torch.Tensor.zero_, outputs)
        return outputs


MUTANTS = (
    Mutant("H12", "Frees the memory of all graphs with the first graph state that is dropped", "one pool of graphs",
           hooks={"graph_state": lambda geometry, state: SharedPool()}),
    Mutant("R24", "Looks up graphs by their number of rows only", "vllm#26499", hooks={"graph_state": _filed_by_rows}),
    of_tutorial(
        "S39",
        "Writes metadata once per plan, so a capture after a warm-up run contains none",
        "a dirty flag on the host; device graph states run a step once before they capture it",
        plugin(WrittenOnce),
    ),
    of_tutorial(
        "S50",
        "Shares graph outputs of one shape among all graphs and graph states",
        "one global graph memory pool for target and draft, with weakly held outputs",
        plugin(graphs=PooledOutputs),
    ),
    of_tutorial(
        "S51",
        "Evicts the oldest of more than 16 graphs, and returns its old outputs after recapture",
        "bounded graph caches (TensorRT-LLM); the 17th graph",
        plugin(graphs=BoundedGraphs),
    ),
    Mutant("W58", "Does nothing when an unknown key is replayed", "sglang#40396", graph_states(_quiet)),
    Mutant("W59", "Replaces a graph when its key is captured again", "TRT-LLM#17110", graph_states(_twice)),
    Mutant("W60", "Declares a graph state without keys", "sglang#40396", _typed(keys=())),
    Mutant("W61", "Declares a graph state of negative size", "sglang#24453", _typed(pool_bytes=-1)),
)  # fmt: skip
KILLER = {
    "H12": "graphs.outputs_stay_while_another_state_replays",
    "R24": "graphs.keys_are_closed_under_padding",
    "S39": "graphs.captured_run_is_right",
    **dict.fromkeys(("S50", "S51"), "graphs.outputs_stay_while_another_state_replays"),
}
