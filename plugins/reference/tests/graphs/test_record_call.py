"""Kernels that torch does not dispatch, inside a recorded graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftmark.errors import CaptureError, GraphError
from draftmark.graphs import is_recording, record_call
from draftmark_reference.graphs import RecordedGraph


def scale_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """Multiply with numpy, as a kernel that torch's dispatcher does not see."""
    np.multiply(x.detach().numpy(), factor, out=out.detach().numpy())


def test_record_call_only_calls_outside_a_recording() -> None:
    """record_call is an ordinary call while no graph is recorded."""
    x, out = torch.ones(2), torch.zeros(2)
    assert not is_recording()
    record_call(scale_into, x, out, 3.0, mutates=(out,))
    assert out.tolist() == [3, 3]


def test_the_call_is_replayed_on_the_same_tensors() -> None:
    """Capture undoes the call's writes; each replay repeats the call between the operators around it."""
    x, out = torch.ones(2), torch.zeros(2)

    def step() -> torch.Tensor:
        doubled = x * 2
        record_call(scale_into, doubled, out, 3.0, mutates=(out,))
        return out + 1

    graph = RecordedGraph(step)
    assert out.tolist() == [0, 0]
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        assert (out.tolist(), graph.outputs.tolist()) == ([6 * value] * 2, [6 * value + 1] * 2)


def test_numbers_in_arguments_keep_their_captured_value() -> None:
    """A replay uses the captured value of a number, as for a kernel argument."""
    x, out, factor = torch.ones(2), torch.zeros(2), {"value": 3.0}
    graph = RecordedGraph(lambda: record_call(scale_into, x, out, factor["value"], mutates=(out,)))
    factor["value"] = 4.0
    graph.replay()
    assert out.tolist() == [3, 3]


def test_the_kernel_may_use_torch_and_record_calls_itself() -> None:
    """Operations inside the call are not recorded: the call is one entry on the tape."""
    x, out = torch.ones(2), torch.zeros(2)

    def inner(x: torch.Tensor, out: torch.Tensor) -> None:
        assert not is_recording()
        record_call(scale_into, x, out, x[0].item() + 1, mutates=(out,))

    graph = RecordedGraph(lambda: record_call(inner, x, out, mutates=(out,)))
    assert len(graph) == 1
    x.fill_(3)
    graph.replay()
    assert out.tolist() == [12, 12]


def test_an_undeclared_write_is_refused_and_undone() -> None:
    """A kernel that writes a tensor outside mutates= is refused, and its write is undone."""
    x, out = torch.ones(2), torch.zeros(2)
    with pytest.raises(CaptureError, match=r"record_call\(scale_into\) wrote a torch.float32 tensor \[2\].*mutates="):
        RecordedGraph(lambda: record_call(scale_into, x, out, 3.0))
    assert out.tolist() == [0, 0]


def test_a_mutated_tensor_must_be_an_argument() -> None:
    """A tensor in mutates= that is no argument is refused, because the graph could not restore or check it."""
    x, out = torch.ones(2), torch.zeros(2)
    with pytest.raises(CaptureError, match="not among its arguments"):
        RecordedGraph(lambda: record_call(lambda x: None, x, mutates=(out,)))


def test_a_freed_argument_is_an_error_at_replay() -> None:
    """A replay checks the arguments of a recorded call like any operand."""
    out, holder = torch.zeros(2), {"x": torch.ones(2)}
    graph = RecordedGraph(lambda: record_call(scale_into, holder["x"], out, 3.0, mutates=(out,)))
    graph.replay()
    holder.clear()
    with pytest.raises(GraphError, match=r"used by record_call\(scale_into\) was freed"):
        graph.replay()
