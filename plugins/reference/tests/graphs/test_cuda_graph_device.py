"""Recorded graphs compared with CUDA graphs: every scenario must have the same outcome in both.

A scenario is a step with its static tensors, and the caller's changes between replays. `outcome` runs a scenario on one
graph state. The host tests check the outcomes of recorded graphs. The device tests require equal outcomes of CUDA
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from draftmark.errors import CaptureError, GraphError
from draftmark.graphs import GraphKey, GraphState, Program, graph_state_for
from draftmark_reference.graphs import RecordedGraphState, mark_host

KEY = GraphKey(Program.DECODE, 4)
REPLAYS = 3
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass
class Setting:
    """Holds the static tensors of a scenario on one device, and a Python number that changes between replays."""

    device: torch.device

    def __post_init__(self) -> None:
        self.x = torch.zeros(4, 8, device=self.device)
        self.lens = torch.zeros(4, dtype=torch.int32, device=self.device)
        self.table = torch.zeros(6, 8, device=self.device)
        self.out = torch.zeros(4, 8, device=self.device)
        self.host = torch.ones(4, 8)
        mark_host(self.host)
        self.kept: list[torch.Tensor] = []
        self.turn(0)

    def turn(self, number: int) -> None:
        """Fill the static tensors for replay `number` with small integers, which add exactly on every device."""
        self.number = number
        # The host creates the numbers, so that a difference between devices in torch.arange cannot matter.
        self.x.copy_(torch.arange(32.0).view(4, 8) - 7 * number)
        self.lens.copy_(torch.tensor([0, 1, 2, 3], dtype=torch.int32) + number % 3)
        self.table.copy_(torch.arange(48.0).view(6, 8) * (number + 1))
        self.out.zero_()


Step = Callable[[Setting], Any]


def grown(s: Setting) -> torch.Tensor:
    out = torch.empty(0, device=s.device)
    torch.add(s.x, 1, out=out)
    return out


def masked_write(s: Setting) -> torch.Tensor:
    y = s.x + 0
    y[y > 5] = 0.0
    y[0] = 3.0
    return y


def accumulated(s: Setting) -> torch.Tensor:
    s.out.add_(s.x)
    s.out[1:].mul_(2)
    return s.out * 2


GOOD: dict[str, Step] = {
    "arithmetic": lambda s: (s.x * 2 + 1, s.x.clamp(min=0), s.x > 3, s.x.sum(1), s.x.cumsum(1)),
    "in place": accumulated,
    "out=": lambda s: (torch.mul(s.x, 2, out=s.out), s.out + 1),
    "grown output": grown,
    "gather": lambda s: (s.table[s.lens.long()], s.x.gather(1, s.lens.long()[:, None])),
    "index_select": lambda s: s.table.index_select(0, s.lens),
    "scatter": lambda s: (s.out.index_copy_(0, s.lens.long().flip(0) % 4, s.x), s.out + 1),
    "masked write": masked_write,
    "matmul": lambda s: s.x @ s.table.t(),
    "topk": lambda s: s.x.topk(3),
    "factories": lambda s: torch.arange(8, device=s.device) + s.lens[:, None] + torch.ones_like(s.x),
    "host scalar": lambda s: s.x * torch.tensor(2.0),
    "sized repeat": lambda s: s.x.repeat_interleave(s.lens * 0 + 2, 0, output_size=8),
    "views": lambda s: (s.x[1:].t(), s.x.view(2, 16)[:, ::2], s.x.tensor_split(2, 1)),
    "inference": torch.inference_mode()(lambda s: torch.nn.functional.linear(s.x, s.table)),
}


def reallocated(s: Setting) -> torch.Tensor:
    # The caller makes a new tensor for each replay and keeps the old ones, so that none is freed.
    s.kept.append(s.x)
    y: torch.Tensor = s.x * 2
    s.x = s.x.clone()
    return y


STALE: dict[str, Step] = {
    "baked number": lambda s: s.x * (s.number + 1),
    "baked branch": lambda s: s.x + 1 if s.number == 0 else s.x - 1,
    "captured slice": lambda s: s.x[: s.number + 1] + 1,
    "re-allocated tensor": reallocated,
}

REFUSED: dict[str, Step] = {
    "item": lambda s: s.x * s.x[0, 0].item(),
    "tolist": lambda s: s.lens.tolist(),
    "cpu": lambda s: s.x.cpu(),
    "to cpu": lambda s: s.x.to("cpu"),
    "bool": lambda s: s.x if (s.x > 0).any() else s.x + 1,
    "print": lambda s: repr(s.x),
    "slice by a tensor": lambda s: s.x[: s.lens[1]],
    "nonzero": lambda s: s.x.nonzero(),
    "mask index": lambda s: s.x[s.x > 0],
    "unique": lambda s: torch.unique(s.lens),
    "masked_select": lambda s: s.x.masked_select(s.x > 0),
    "one_hot": lambda s: torch.nn.functional.one_hot(s.lens.long()),
    "unsized repeat": lambda s: s.x.repeat_interleave(s.lens, 0),
    "list to device": lambda s: torch.tensor([1, 2], device=s.device),
    "number to device": lambda s: torch.tensor(1.0, device=s.device),
    "list index": lambda s: s.x[[0, 2]],
    "pageable copy": lambda s: s.x.copy_(s.host),
}


def outcome(state: GraphState, device: torch.device, step: Step) -> list[list[torch.Tensor]] | str:
    """Return outputs and static tensors after each replay, on the host; ``"refused"`` if the capture is refused."""
    setting = Setting(device)
    try:
        outputs = state.capture(KEY, lambda: step(setting))
    except CaptureError:
        return "refused"
    seen = []
    for number in range(1, REPLAYS + 1):
        setting.turn(number)
        assert state.replay(KEY) is outputs
        leaves = tree_leaves((outputs, setting.lens, setting.out))
        seen.append([leaf.detach().to("cpu", copy=True) for leaf in leaves])
    return seen


def eager(step: Step) -> list[list[torch.Tensor]]:
    setting, seen = Setting(CPU), []
    for number in range(1, REPLAYS + 1):
        setting.turn(number)
        outputs = step(setting)
        seen.append([leaf.detach().clone() for leaf in tree_leaves((outputs, setting.lens, setting.out))])
    return seen


def same(left: list[list[torch.Tensor]] | str, right: list[list[torch.Tensor]] | str) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return left == right
    pairs = [pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_step_equals_eager_in_a_recorded_graph(name: str) -> None:
    """A capturable step computes the same tensors in every replay as in eager mode."""
    assert same(outcome(RecordedGraphState(), CPU, GOOD[name]), eager(GOOD[name]))


@pytest.mark.parametrize("name", STALE)
def test_a_stale_step_differs_from_eager_in_a_recorded_graph(name: str) -> None:
    """A step that depends on Python state can be captured, but its replays differ from eager mode."""
    recorded = outcome(RecordedGraphState(), CPU, STALE[name])
    assert recorded != "refused"
    assert not same(recorded, eager(STALE[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_a_forbidden_step_is_refused_by_a_recorded_graph(name: str) -> None:
    """A step with a host read or a pageable copy cannot be captured."""
    assert outcome(RecordedGraphState(), CPU, REFUSED[name]) == "refused"


# Refused steps come last: a failed capture may disturb the process's CUDA random state.
@pytest.mark.device
@on_device
@pytest.mark.parametrize("name", [*GOOD, *STALE, *REFUSED])
def test_a_cuda_graph_behaves_like_a_recorded_graph(name: str) -> None:
    """Both graphs refuse a step, or both give equal tensors in every replay."""
    step = {**GOOD, **STALE, **REFUSED}[name]
    recorded = outcome(RecordedGraphState(), CPU, step)
    real = outcome(graph_state_for(CUDA), CUDA, step)
    assert same(recorded, real), f"recorded: {recorded}\ncuda: {real}"


@pytest.mark.device
@on_device
def test_cuda_random_numbers_advance_with_each_replay() -> None:
    """Each replay of a CUDA graph draws new numbers from the default generator, as in a recorded graph."""
    state = graph_state_for(CUDA)
    outputs = state.capture(KEY, lambda: torch.rand(64, device=CUDA))
    state.replay(KEY)
    first = outputs.clone()
    state.replay(KEY)
    assert not torch.equal(first, outputs)


@pytest.mark.device
@on_device
def test_cuda_graphs_share_a_pool_and_keep_outputs_separate() -> None:
    """A replay does not change another graph's outputs; pool_bytes counts the pool without the static tensors."""
    state = graph_state_for(CUDA)
    x = torch.ones(1 << 20, device=CUDA)
    small = state.capture(GraphKey(Program.DECODE, 1), lambda: x[:1024] + 1)
    large = state.capture(GraphKey(Program.DECODE, 4), lambda: (x + 1) * (x + 2))
    state.replay(GraphKey(Program.DECODE, 1))
    x.fill_(3)
    state.replay(GraphKey(Program.DECODE, 4))
    assert torch.all(small == 2) and torch.all(large == 20)
    assert state.pool_bytes >= large.nbytes


@pytest.mark.device
@on_device
def test_cuda_misuse_raises_the_errors_of_the_cpu() -> None:
    """An unknown key and a key captured twice raise the error texts of a recorded graph state."""
    for misuse in (lambda s: s.replay(KEY), lambda s: [s.capture(KEY, lambda: None) for _ in range(2)]):
        sentences = []
        for state in (RecordedGraphState(), graph_state_for(CUDA)):
            with pytest.raises(GraphError) as caught:
                misuse(state)
            sentences.append(str(caught.value))
        assert sentences[0] == sentences[1]


@pytest.mark.device
@on_device
def test_an_error_of_the_step_passes_through_a_cuda_capture() -> None:
    """An exception of the step itself is not turned into a CaptureError, and the state can capture again."""
    state, x = graph_state_for(CUDA), torch.ones(4, device=CUDA)

    def step() -> torch.Tensor:
        y = x + 1
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("own")
        return y

    with pytest.raises(ValueError, match="own"):
        state.capture(KEY, step)
    outputs = state.capture(KEY, lambda: x + 1)
    state.replay(KEY)
    assert outputs.tolist() == [2] * 4


def write_one_element(s: Setting) -> torch.Tensor:
    s.out[0, 0] = 5.0
    return s.out + 1


@pytest.mark.device
@on_device
def test_known_difference_cuda_refuses_a_one_element_write() -> None:
    """CUDA refuses `x[0, 0] = 5.`, which copies a host scalar to one element; a recorded graph accepts it."""
    assert same(outcome(RecordedGraphState(), CPU, write_one_element), eager(write_one_element))
    assert outcome(graph_state_for(CUDA), CUDA, write_one_element) == "refused"
