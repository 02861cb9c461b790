"""Graph keys, padding, and the behaviour that all graph states share."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftmark.errors import GraphError
from draftmark.graphs import GraphKey, GraphState, Program, graph_state_for, padded_batch_size
from draftmark_reference.graphs import RecordedGraphState

KEY = GraphKey(Program.VERIFY, 4)


def test_keys_and_protocol_import_without_torch() -> None:
    """Importing the graphs package does not import torch."""
    code = "import sys, draftmark.graphs as g; g.GraphKey(g.Program.DRAFT, 1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_prints_as_program_and_size() -> None:
    """The text of a key is the program's name with its padded batch size."""
    assert str(KEY) == "VERIFY[4]"


def test_equal_keys_are_one_key() -> None:
    """Equal keys find the same graph."""
    assert {GraphKey(Program.VERIFY, 4): 1}[KEY] == 1


@pytest.mark.parametrize(("num_reqs", "size"), [(0, 1), (1, 1), (2, 4), (4, 4), (8, 8), (9, None)])
def test_padding_takes_the_smallest_size_that_holds_the_batch(num_reqs: int, size: int | None) -> None:
    """A batch is padded to the smallest captured size; a batch larger than all of them runs eagerly."""
    assert padded_batch_size(num_reqs, [8, 1, 4]) == size


def test_without_captured_sizes_nothing_is_padded() -> None:
    """Without captured sizes every batch runs eagerly."""
    assert padded_batch_size(1, []) is None


def test_the_cpu_gets_recorded_graphs() -> None:
    """The graph state for the CPU is the recorded one, and it is a GraphState."""
    state = graph_state_for(torch.device("cpu"))
    assert isinstance(state, RecordedGraphState)
    assert isinstance(state, GraphState)


def test_replay_returns_the_object_that_capture_returned() -> None:
    """A replay returns the object of the capture, of any nesting, with new contents."""
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
    """A replay of a key without a graph raises an error with the captured keys and the remedy."""
    state = RecordedGraphState()
    state.capture(KEY, lambda: None)
    sentence = r"DECODE\[4\] was never captured \(captured: VERIFY\[4\]\).*padded_batch_size"
    with pytest.raises(GraphError, match=sentence):
        state.replay(GraphKey(Program.DECODE, 4))


def test_capturing_a_key_twice_is_an_error() -> None:
    """Each key has at most one graph."""
    state = RecordedGraphState()
    state.capture(KEY, lambda: None)
    with pytest.raises(GraphError, match=r"VERIFY\[4\] is already captured"):
        state.capture(KEY, lambda: None)


def test_a_failed_capture_leaves_its_key_free() -> None:
    """After a step has raised, its key can be captured again."""
    state = RecordedGraphState()
    with pytest.raises(ZeroDivisionError) as caught:
        state.capture(KEY, lambda: 1 / 0)
    assert caught.value.__notes__ == ["while capturing graph VERIFY[4]"]
    assert state.keys == ()
    state.capture(KEY, lambda: None)


def test_keys_are_sorted_and_pool_bytes_add_up() -> None:
    """`keys` is sorted; `pool_bytes` counts tensors that the steps allocate, without the static tensors."""
    x = torch.ones(256)
    state = RecordedGraphState()
    state.capture(GraphKey(Program.DECODE, 4), lambda: x + 1)
    state.capture(GraphKey(Program.DECODE, 1), lambda: x.add_(1))
    assert state.keys == (GraphKey(Program.DECODE, 1), GraphKey(Program.DECODE, 4))
    assert state.pool_bytes == 256 * 4
