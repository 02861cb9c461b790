"""Steps that a recorded graph accepts, although a device would refuse them or give wrong results.

The tests keep the list of limits in `draftmark_reference.graphs.recorded` correct. If one of these tests fails, that
limit is gone: add a rule for the step instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftmark.graphs import record_call
from draftmark_reference.graphs import RecordedGraph

X = torch.arange(4.0)
NUMPY_VIEW = X.numpy()
BUFFER = bytearray(16)


class Closure:
    """A kernel that keeps its tensor as an attribute instead of taking it as an argument."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def __call__(self) -> None:
        self.x.add_(1)


ESCAPES: dict[str, Callable[[], Any]] = {
    "copy to a device object that is the host": lambda: X.to(torch.device("cpu")) + 1,
    "forgotten device=": lambda: X + torch.arange(4),
    "read through a numpy view made before": lambda: X * float(NUMPY_VIEW[2]),
    "write of one element, a host-to-device copy": lambda: X.__setitem__(0, 5.0),
    "tensor over a Python buffer": lambda: X + torch.frombuffer(BUFFER, dtype=torch.float32),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_known_escape_captures_silently(name: str) -> None:
    """The capture succeeds, although a device would refuse the step or keep the value of the capture."""
    RecordedGraph(ESCAPES[name])


def test_known_escape_a_tensor_in_a_closure_is_not_restored() -> None:
    """record_call tracks only arguments: writes to tensors in a closure are neither undone nor checked."""
    kernel = Closure()
    RecordedGraph(lambda: record_call(kernel))
    assert kernel.x.tolist() == [2, 2]


def test_known_escape_python_state_is_not_restored() -> None:
    """Capture undoes effects on tensors, not on Python objects."""
    calls: list[int] = []
    RecordedGraph(lambda: calls.append(1))
    assert calls == [1]


def test_known_escape_a_tensor_with_another_reference_is_alive() -> None:
    """A static tensor that the caller dropped, but another object references, is read without an error."""
    holder = {"x": torch.ones(2)}
    forgotten = [holder["x"]]
    graph = RecordedGraph(lambda: holder["x"] + 1)
    holder["x"] = torch.zeros(2)
    graph.replay()
    assert graph.outputs.tolist() == [2, 2] and len(forgotten) == 1


def test_known_escape_a_freed_intermediate_keeps_its_memory() -> None:
    """A device may reuse an intermediate's memory within and between graphs; here it stays readable."""
    peek: list[int] = []

    def step() -> torch.Tensor:
        intermediate = X + 1
        peek.append(intermediate.data_ptr())
        return intermediate * 2

    graph = RecordedGraph(step)
    assert graph.pool_bytes == 2 * X.nbytes
