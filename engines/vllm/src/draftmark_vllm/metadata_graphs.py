"""CUDA graphs of metadata launches, replayed next to vLLM's own graphs of the model.

vLLM captures the model once for each batch size, over tensors at fixed addresses. Before each replay the builder
launches kernels that compute lengths, slots and a schedule for each shape of layer. They read only tensors at fixed
addresses. So the builder captures its launches too: a step then costs the host one launch instead of three or more.
"""

from __future__ import annotations

import torch

from draftmark import Mode
from draftmark.runtime import ForwardBatch, GraphKey, GraphState, Program, graph_state_for

from .batch_runs import BatchRun
from .bound_backends import BoundBackends
from .step import Step, StepBuffers

PROGRAMS = {Mode.DECODE: Program.DECODE, Mode.VERIFY: Program.VERIFY}
"""Programs by mode, for the modes with full graphs in vLLM: every request has the same number of rows."""
PREFIXES = GraphKey(Program.DRAFT_EXTEND, 0)
"""Key of the graph of `StepBuffers.prefixes`, which has a graph state of its own."""


class MetadataGraphs:
    """Captures and replays one builder's metadata launches. Without host lengths, a batch's size fixes the launches.

    Steps with prompts seldom have equal sizes, so for them a graph computes only the prefix lengths.

    Args:
        bound: backends of the builder. buffers: static tensors of the builder.
    """

    def __init__(self, bound: BoundBackends, buffers: StepBuffers, device: torch.device) -> None:
        self._bound, self._buffers, self._device = bound, buffers, device
        # Returns whether a surrounding graph capture is active on the current stream; on a CPU, bool() is False.
        self._is_capturing = torch.cuda.is_current_stream_capturing if device.type == "cuda" else bool
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._prefixes: dict[tuple[int, int], GraphState] = {}

    def capture(self, step: Step, run: BatchRun, batch: ForwardBatch) -> None:
        """Capture a batch's metadata launches, unless a graph for its size and the step's tensors exists.

        Args:
            batch: batch of the run, already filled and prepared.
        """
        key = _key(run)
        if key is None or self._is_capturing():
            return
        tensors = _tensors(step)
        if tensors not in self._captured:
            self._captured[tensors] = Captured(self._device)
        captured = self._captured[tensors]
        if key in captured.batches:
            return
        self._capture_prefixes(step)

        def write() -> None:
            self._buffers.fill(batch, step, run)
            self._bound.write(batch)

        captured.graphs.capture(key, write)
        captured.batches[key] = batch

    def _capture_prefixes(self, step: Step) -> None:
        """Capture the prefix lengths of steps with prompts; replays need tensors at the same addresses."""
        addresses = step.query_start.data_ptr(), step.seq_lens.data_ptr()
        compute = None if addresses in self._prefixes else self._buffers.prefixes(step)
        if compute is not None:
            self._prefixes[addresses] = graphs = graph_state_for(self._device)
            graphs.capture(PREFIXES, compute)

    def fill(self, batch: ForwardBatch, step: Step, run: BatchRun) -> None:
        """Compute a batch's step-dependent tensors, by a replay if there is a graph for an EXTEND run."""
        graphs = None
        if run.mode is Mode.EXTEND and not self._is_capturing():
            graphs = self._prefixes.get((step.query_start.data_ptr(), step.seq_lens.data_ptr()))
        if graphs is None:
            self._buffers.fill(batch, step, run)
        else:
            graphs.replay(PREFIXES)

    def prepare(self, step: Step, run: BatchRun) -> ForwardBatch | None:
        """Replay the graph that writes a run's metadata, and return its batch; None if no captured graph fits."""
        key, captured = _key(run), self._captured.get(_tensors(step))
        if key is None or captured is None or key not in captured.batches or self._is_capturing():
            return None
        batch = captured.batches[key]
        self._bound.plan(batch)
        captured.graphs.replay(key)
        return batch


class Captured:
    """Holds the graphs that were captured over one set of tensors.

    Attributes:
        graphs: the captured graphs.
        batches: the batch of each graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.graphs: GraphState = graph_state_for(device)
        self.batches: dict[GraphKey, ForwardBatch] = {}


def _key(run: BatchRun) -> GraphKey | None:
    """Return the graph key of a step's first run; None for a later run, or a mode that vLLM does not capture."""
    program = PROGRAMS.get(run.mode)
    return None if program is None or run.first_req else GraphKey(program, run.padded_reqs)


def _tensors(step: Step) -> tuple[int, ...]:
    """Return the addresses and strides of a step's tensors. A captured graph is valid only if these are equal."""
    table = step.page_table
    return step.seq_lens.data_ptr(), table.data_ptr(), table.stride(0), table.shape[1], step.slots.data_ptr()
