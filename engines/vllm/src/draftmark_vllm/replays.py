"""Steps that vLLM replays, whose metadata is written by a replay too.

For each size of batch vLLM captures the model once, over tensors that stay where they are. What the builder launches
between two replays, lengths, slots and a schedule for each shape of layer, hangs on the same tensors alone: so it is
captured beside, and a step costs the host one launch, where one by one they are three and more.
"""

from __future__ import annotations

import torch

from draftmark import Mode
from draftmark.runtime import ForwardBatch, GraphKey, GraphState, Program, graph_state_for

from .served import Served
from .spans import Span
from .step import Step, StepBuffers

PROGRAMS = {Mode.DECODE: Program.DECODE, Mode.VERIFY: Program.VERIFY}
"""Of the modes that vLLM has whole graphs of: each request of a step has as many rows."""


class Replays:
    """The graphs of one builder, whose backends are told no lengths: a batch of a size is the same in every step.

    Args:
        served, buffers: the builder's.
    """

    def __init__(self, served: Served, buffers: StepBuffers, device: torch.device) -> None:
        self._served, self._buffers, self._device = served, buffers, device
        self._captured: dict[tuple[int, ...], Captured] = {}

    def capture(self, step: Step, span: Span, batch: ForwardBatch) -> None:
        """Capture what was launched for a batch, once for its size and the step's tensors.

        Args:
            batch: of the span, filled and prepared.
        """
        key = _key(span)
        if key is None or _is_capturing(self._device):
            return
        tensors = _tensors(step)
        if tensors not in self._captured:
            self._captured[tensors] = Captured(self._device)
        captured = self._captured[tensors]
        if key in captured.batches:
            return

        def write() -> None:
            self._buffers.fill(batch, step, span)
            self._served.write(batch)

        captured.graphs.capture(key, write)
        captured.batches[key] = batch

    def prepare(self, step: Step, span: Span) -> ForwardBatch | None:
        """Prepare a span by a replay; None if nothing was captured of its size over these tensors."""
        key, captured = _key(span), self._captured.get(_tensors(step))
        if key is None or captured is None or key not in captured.batches or _is_capturing(self._device):
            return None
        batch = captured.batches[key]
        self._served.plan(batch)
        captured.graphs.replay(key)
        return batch


class Captured:
    """What was captured over the same tensors.

    Attributes:
        batches: of each graph the batch that it was captured for.
    """

    def __init__(self, device: torch.device) -> None:
        self.graphs: GraphState = graph_state_for(device)
        self.batches: dict[GraphKey, ForwardBatch] = {}


def _key(span: Span) -> GraphKey | None:
    """Of a step's first span; None of one that vLLM has no whole graph of."""
    program = PROGRAMS.get(span.mode)
    return None if program is None or span.first_req else GraphKey(program, span.padded_reqs)


def _tensors(step: Step) -> tuple[int, ...]:
    """All that launches take from a step's tensors, beside the sizes of its first span."""
    table = step.page_table
    return step.seq_lens.data_ptr(), table.data_ptr(), table.stride(0), table.shape[1], step.slots.data_ptr()


def _is_capturing(device: torch.device) -> bool:
    """Whether the launches are part of another's graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
