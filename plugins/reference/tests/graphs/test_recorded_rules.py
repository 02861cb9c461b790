"""Rules of device graphs that a recorded graph follows; its capture has no side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmark.errors import CaptureError, GraphError
from draftmark.graphs import is_recording
from draftmark_reference.graphs import RecordedGraph


def test_capture_changes_no_tensor_and_no_random_state() -> None:
    """Capture undoes writes to tensors that existed before, through views and out= too, and restores the generator."""
    x, y, out = torch.arange(4.0), torch.arange(6), torch.ones(4)
    random_state = torch.get_rng_state()

    def step() -> None:
        x[1:].mul_(3)
        y.view(2, 3).t()[0].zero_()
        torch.add(x, torch.rand(4), out=out)

    RecordedGraph(step)
    assert (x.tolist(), y.tolist(), out.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [1, 1, 1, 1])
    assert torch.equal(torch.get_rng_state(), random_state)


def test_outputs_are_poison_until_the_first_replay() -> None:
    """After capture floats are NaN and integers are large; the first replay writes the real values."""
    x = torch.ones(3)
    graph = RecordedGraph(lambda: (x + 1, x.bfloat16(), x.int(), x > 0))
    floats, halves, integers, flags = graph.outputs
    assert floats.isnan().all() and halves.isnan().all()
    assert integers.tolist() == [0x7A7A7A7A] * 3
    graph.replay()
    assert (floats.tolist(), halves.tolist(), integers.tolist()) == ([2] * 3, [1] * 3, [1] * 3)
    assert flags.tolist() == [True] * 3


def test_unwritten_memory_stays_poison() -> None:
    """A step that reads uninitialized memory returns NaN, not zero."""
    graph = RecordedGraph(lambda: torch.empty(3) + 0)
    graph.replay()
    assert graph.outputs.isnan().all()


def test_memory_of_a_dropped_graph_is_poison() -> None:
    """A tensor that a graph allocated is useless after the graph is dropped: a device gives its memory to others."""
    x, kept = torch.ones(3), []
    graph = RecordedGraph(lambda: kept.append(x + 1))
    graph.replay()
    assert kept[0].tolist() == [2, 2, 2]
    del graph
    assert kept[0].isnan().all()


def test_memory_of_a_failed_capture_is_poison() -> None:
    """A tensor that a failed capture allocated is useless afterwards."""
    x, kept = torch.ones(3), []

    def step() -> None:
        kept.append(x + 1)
        raise ValueError("the step fails")

    with pytest.raises(ValueError, match="the step fails"):
        RecordedGraph(step)
    assert kept[0].isnan().all()


def test_a_python_number_keeps_its_captured_value() -> None:
    """A number read from Python at capture keeps its value in every replay."""
    x, scale = torch.ones(2), {"value": 2}
    graph = RecordedGraph(lambda: x * scale["value"])
    scale["value"] = 3
    graph.replay()
    assert graph.outputs.tolist() == [2, 2]


def test_a_python_branch_keeps_its_captured_side() -> None:
    """A replay runs the branch that Python took at capture."""
    x, flag = torch.ones(2), {"draft": True}
    graph = RecordedGraph(lambda: x + 1 if flag["draft"] else x - 1)
    flag["draft"] = False
    graph.replay()
    assert graph.outputs.tolist() == [2, 2]


def test_a_captured_slice_keeps_its_batch_size() -> None:
    """A slice taken at capture covers the captured rows only (sglang#26521)."""
    lens, live = torch.zeros(4, dtype=torch.int32), {"reqs": 2}
    graph = RecordedGraph(lambda: lens[: live["reqs"]] + 1)
    lens.copy_(torch.tensor([1, 2, 3, 4]))
    live["reqs"] = 4
    graph.replay()
    assert graph.outputs.tolist() == [2, 3]


def test_a_reallocated_tensor_is_not_seen() -> None:
    """The graph still reads the tensor of the capture while another reference keeps that tensor alive."""
    holder = {"lens": torch.ones(2)}
    old = holder["lens"]
    graph = RecordedGraph(lambda: holder["lens"] * 10)
    holder["lens"] = torch.full((2,), 7.0)
    graph.replay()
    assert graph.outputs.tolist() == [10, 10]
    assert old.tolist() == [1, 1]


def test_a_freed_tensor_is_an_error_at_replay() -> None:
    """After the last reference to a static tensor is dropped, the next replay raises with the tensor's shape."""
    holder: dict[str, Any] = {"lens": torch.ones(2, 3)}
    graph = RecordedGraph(lambda: holder["lens"][1:] * 10)
    graph.replay()
    holder["lens"] = torch.ones(2, 3)
    with pytest.raises(GraphError, match=r"float32 tensor \[2, 3\] used by aten\.slice\.Tensor was freed.*keep every"):
        graph.replay()


def test_a_view_or_an_output_keeps_a_static_tensor_alive() -> None:
    """Any reference to the storage keeps it alive: a view of the caller, or the outputs that the state keeps."""
    holder: dict[str, Any] = {"x": torch.ones(4)}
    graph = RecordedGraph(lambda: holder["x"].add_(1)[:2])
    holder.clear()
    graph.replay()
    assert graph.outputs.tolist() == [2, 2]


def test_a_temporary_of_the_caller_is_freed_after_capture() -> None:
    """A tensor made before the step, without references after it, raises at the first replay."""
    x = torch.ones(2)

    def capture() -> RecordedGraph:
        scratch = torch.zeros(2)
        return RecordedGraph(lambda: torch.add(x, 1, out=scratch) * 2)

    graph = capture()
    with pytest.raises(GraphError, match="was freed"):
        graph.replay()


def test_a_static_tensor_that_grew_is_an_error_at_replay() -> None:
    """A resized static tensor has a new address, which the graph does not use."""
    x = torch.ones(2)
    graph = RecordedGraph(lambda: x + 1)
    x.resize_(1 << 16)
    with pytest.raises(GraphError, match="was re-allocated after capture"):
        graph.replay()


def test_growing_a_static_tensor_inside_the_region_is_refused() -> None:
    """A step that grows the caller's out= tensor is refused: the new memory would be in the graph's pool."""
    x, out = torch.ones(64), torch.ones(1)
    refusal = r"aten\.add\.out cannot be captured: it re-allocates"
    with pytest.raises(CaptureError, match=refusal), pytest.warns(UserWarning):
        RecordedGraph(lambda: torch.add(x, 1, out=out))


def test_random_numbers_advance_with_each_replay() -> None:
    """Each replay draws new numbers from the default generator, which depend on the seed."""
    graph = RecordedGraph(lambda: torch.rand(8))
    torch.manual_seed(1)
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(graph.outputs, first)
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(8))


def test_captures_do_not_nest() -> None:
    """A capture inside a capture is refused; a later capture works."""
    with pytest.raises(CaptureError, match="inside another capture"):
        RecordedGraph(lambda: RecordedGraph(lambda: None))
    assert not is_recording()
    RecordedGraph(lambda: None)


def test_a_replay_inside_a_capture_is_an_error() -> None:
    """A graph cannot be replayed while another is captured."""
    inner = RecordedGraph(lambda: None)
    with pytest.raises(GraphError, match="replayed inside a capture"):
        RecordedGraph(inner.replay)


def test_an_error_in_the_step_restores_all_state() -> None:
    """Tensors, random state and the recording flag are restored when the step raises."""
    x = torch.ones(2)
    random_state = torch.get_rng_state()

    def step() -> None:
        x.add_(torch.rand(2))
        assert is_recording()
        raise ValueError("step")

    with pytest.raises(ValueError, match="step"):
        RecordedGraph(step)
    assert not is_recording()
    assert x.tolist() == [1, 1]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (x + 1).tolist() == [2, 2]


def test_a_caught_refusal_still_ends_the_capture() -> None:
    """A step that catches the CaptureError is still refused."""
    x = torch.ones(2)

    def step() -> torch.Tensor:
        try:
            return x * x[0].item()
        except Exception:
            return x

    with pytest.raises(CaptureError, match=r"Tensor\.item"):
        RecordedGraph(step)


def test_a_host_scalar_changes_in_place_at_capture_only() -> None:
    """Arithmetic on a host scalar runs on the host, once: the graph keeps its result."""
    x = torch.zeros(2)

    def step() -> torch.Tensor:
        scale = torch.tensor(1.0)
        scale.add_(1)
        return x + scale

    graph = RecordedGraph(step)
    for _ in range(3):
        graph.replay()
    assert graph.outputs.tolist() == [2, 2]


def test_inference_tensors_and_normal_tensors_replay_in_any_mode() -> None:
    """A replay writes static tensors made inside and outside inference mode, and itself runs in both modes."""
    normal = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
        graph = RecordedGraph(lambda: (normal.add_(1), inference.add_(normal)))
    graph.replay()
    with torch.inference_mode():
        graph.replay()
    assert (normal.tolist(), inference.tolist()) == ([2, 2], [3, 3])


def test_parameters_that_require_grad_can_be_read() -> None:
    """A step over a trainable module also captures with gradients enabled."""
    layer, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    graph = RecordedGraph(lambda: layer(x))
    x.normal_()
    graph.replay()
    assert torch.equal(graph.outputs, layer(x))
