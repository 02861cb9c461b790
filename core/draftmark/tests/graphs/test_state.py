"""Keys, padding, and what every graph state shares."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftmark.errors import GraphError
from draftmark.graphs import (
    GraphKey,
    GraphState,
    Program,
    RecordedGraphState,
    graph_state_for,
    padded_batch_size,
)

KEY = GraphKey(Program.VERIFY, 4)


def test_keys_and_protocol_import_without_torch() -> None:
    """Importing the graphs package does not import torch."""
    code = "import sys, draftmark.graphs as g; g.GraphKey(g.Program.DRAFT, 1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_prints_as_program_and_size() -> None:
    """A key reads as the program's name with its padded batch size."""
    assert str(KEY) == "VERIFY[4]"


def test_equal_keys_are_one_key() -> None:
    """A key is a value: equal ones find the same graph, whoever made them."""
    assert {GraphKey(Program.VERIFY, 4): 1}[KEY] == 1


@pytest.mark.parametrize(("num_reqs", "size"), [(0, 1), (1, 1), (2, 4), (4, 4), (8, 8), (9, None)])
def test_padding_takes_the_smallest_size_that_holds_the_batch(num_reqs: int, size: int | None) -> None:
    """A batch is padded to the smallest captured size, and one that exceeds all runs eagerly."""
    assert padded_batch_size(num_reqs, [8, 1, 4]) == size


def test_without_captured_sizes_nothing_is_padded() -> None:
    """No captured size means no graph."""
    assert padded_batch_size(1, []) is None


def test_the_cpu_gets_recorded_graphs() -> None:
    """torch's own graph state for the CPU is the recorded one, and it is a GraphState."""
    state = graph_state_for(torch.device("cpu"))
    assert isinstance(state, RecordedGraphState)
    assert isinstance(state, GraphState)


def test_replay_returns_the_object_that_capture_returned() -> None:
    """Outputs of any nest are kept, and replay hands back the same object with new contents."""
    x = torch.ones(3)
    state = RecordedGraphState()
    captured = state.capture(KEY, lambda: {"sum": (x + 1, None), "x": (x, x)})
    result: torch.Tensor = captured["sum"][0]
    address = result.data_ptr()
    x.fill_(5)
    assert state.replay(KEY) is captured
    assert result.tolist() == [6, 6, 6]
    assert result.data_ptr() == address
    assert captured["x"][0] is x


def test_replay_of_an_unknown_key_names_the_captured_ones() -> None:
    """Replaying what was never captured is an error with the captured keys and the remedy."""
    state = RecordedGraphState()
    state.capture(KEY, lambda: None)
    sentence = r"DECODE\[4\] was never captured \(captured: VERIFY\[4\]\).*padded_batch_size"
    with pytest.raises(GraphError, match=sentence):
        state.replay(GraphKey(Program.DECODE, 4))


def test_capturing_a_key_twice_is_an_error() -> None:
    """A key belongs to one graph."""
    state = RecordedGraphState()
    state.capture(KEY, lambda: None)
    with pytest.raises(GraphError, match=r"VERIFY\[4\] is already captured"):
        state.capture(KEY, lambda: None)


def test_a_failed_capture_leaves_its_key_free() -> None:
    """After a step has raised, the same key can be captured."""
    state = RecordedGraphState()
    with pytest.raises(ZeroDivisionError) as caught:
        state.capture(KEY, lambda: 1 / 0)
    assert caught.value.__notes__ == ["while capturing graph VERIFY[4]"]
    assert state.keys == ()
    state.capture(KEY, lambda: None)


def test_keys_come_in_order_and_pool_bytes_add_up() -> None:
    """`keys` is sorted; `pool_bytes` counts what the steps made and not the static tensors."""
    x = torch.ones(256)
    state = RecordedGraphState()
    state.capture(GraphKey(Program.DECODE, 4), lambda: x + 1)
    state.capture(GraphKey(Program.DECODE, 1), lambda: x.add_(1))
    assert state.keys == (GraphKey(Program.DECODE, 1), GraphKey(Program.DECODE, 4))
    assert state.pool_bytes == 256 * 4
