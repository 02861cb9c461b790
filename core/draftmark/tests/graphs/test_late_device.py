"""A late device against the real thing: every scenario must go alike behind a GPU that sleeps.

A scenario sends work and lets the host go on. The host tests fix what a `LateDevice` shows, right or wrong; the device
tests demand the same of a CUDA stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draftmark.arena import Arena
from draftmark.buffers import BufferSpec, Memory, Role, Unit
from draftmark.devices import synchronize
from draftmark.errors import GraphError
from draftmark.graphs import (
    GraphKey,
    LateDevice,
    Program,
    RecordedGraph,
    graph_state_for,
    late_device,
    mark_host,
    mark_pinned,
    record_call,
)
from draftmark.graphs.active import LATE
from draftmark.transfer import AsyncHostCopy, fence, to_device

from .test_cuda_graph_device import GOOD, REFUSED, Setting, Step, eager

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KEY = GraphKey(Program.DECODE, 4)
CYCLES = 100_000_000
"""Of a GPU's clock: some 50 ms, where a scenario sends for less than one."""


class Memories:
    """Tensors of a scenario: on a device, in pinned memory, and in pageable memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.x = torch.zeros(4, device=device)
        self.staging, self.arrived = self._pinned(), self._pinned()
        self.pageable = torch.zeros(4)
        mark_host(self.pageable)
        self.fence = fence(device)
        self.graphs = graph_state_for(device)
        self.copied = torch.zeros(4, device=device)
        self.graphs.capture(KEY, lambda: self.copied.copy_(self.staging, non_blocking=True))

    def _pinned(self) -> torch.Tensor:
        made = torch.zeros(4, pin_memory=self.device.type == "cuda")
        mark_pinned(made)
        return made

    def up(self, value: float, *, fenced: bool = False) -> torch.Tensor:
        """Stage a number, send it up and double it there."""
        self.staging.fill_(value)
        self.x.copy_(self.staging, non_blocking=True)
        if fenced:
            self.fence.record()
        return self.x * 2


Scenario = Callable[[Memories], list[Any]]


def rewritten(m: Memories) -> list[Any]:
    return [m.up(1), m.up(2)]


def fenced(m: Memories) -> list[Any]:
    first = m.up(1, fenced=True)
    m.fence.synchronize()
    return [first, m.up(2)]


def fenced_too_early(m: Memories) -> list[Any]:
    m.staging.fill_(1)
    m.fence.record()
    m.x.copy_(m.staging, non_blocking=True)
    first = m.x * 2
    m.fence.synchronize()
    return [first, m.up(2)]


def cleared_behind_the_copy(m: Memories) -> list[Any]:
    doubled = m.up(1)
    m.staging.zero_()
    return [doubled]


def blocking(m: Memories) -> list[Any]:
    m.staging.fill_(1)
    m.x.copy_(m.staging)
    first = m.x * 2
    m.staging.fill_(2)
    m.x.copy_(m.staging)
    return [first, m.x * 2]


def blocked_by_another_copy(m: Memories) -> list[Any]:
    first = m.up(1)
    m.x.copy_(m.pageable)
    m.staging.fill_(2)
    return [first]


def pageable(m: Memories) -> list[Any]:
    m.pageable.fill_(1)
    m.x.copy_(m.pageable, non_blocking=True)
    m.pageable.fill_(2)
    return [m.x * 2]


def fresh_numbers(m: Memories) -> list[Any]:
    return [to_device([n], m.device, torch.float32) * 2 for n in (1, 2)]


def moved_to_the_device(m: Memories) -> list[Any]:
    m.staging.fill_(1)
    moved = m.staging.to(m.device, non_blocking=True)
    doubled = moved * 2
    m.staging.fill_(2)
    return [doubled]


def awaited_read(m: Memories) -> list[Any]:
    doubled = m.up(1)
    seen = doubled[0].item()
    m.staging.fill_(2)
    return [seen, doubled]


def arrival_not_awaited(m: Memories) -> list[Any]:
    m.x.fill_(3)
    m.arrived.copy_(m.x, non_blocking=True)
    seen = m.arrived.tolist()[0]
    return [seen, m.arrived]


def arrival_awaited(m: Memories) -> list[Any]:
    m.x.fill_(3)
    arrival = AsyncHostCopy([m.x])
    m.x.fill_(4)
    return [arrival.wait()[0][0], m.x]


def numbers_of_a_launch(m: Memories) -> list[Any]:
    number = 1.0
    first = m.x + number
    number = 2.0
    return [first, m.x + number]


def moved_within_the_device(m: Memories) -> list[Any]:
    source = torch.ones(4, device=m.device)
    m.x.copy_(source)
    first = m.x * 2
    source.fill_(2)
    m.x.copy_(source)
    return [first, m.x * 2]


def replays(m: Memories) -> list[Any]:
    found = []
    for value in (1, 2):
        m.staging.fill_(value)
        found.append(m.graphs.replay(KEY).clone())
    return found


def fenced_replays(m: Memories) -> list[Any]:
    found = []
    for value in (1, 2):
        m.fence.synchronize()
        m.staging.fill_(value)
        found.append(m.graphs.replay(KEY).clone())
        m.fence.record()
    return found


def launches(m: Memories) -> list[Any]:
    found = []
    for value in (1.0, 2.0):
        record_call(_add, m.x, value, mutates=(m.x,))
        found.append(m.x.clone())
    return found


def _add(x: torch.Tensor, number: float) -> None:
    x.add_(number)


def dropped(m: Memories) -> list[Any]:
    doubled = m.up(1)
    m.staging = m.arrived  # torch's allocator keeps the block until torch's own copy from it is through
    torch.full((4,), 9.0, pin_memory=m.device.type == "cuda")
    return [doubled]


def synchronised(m: Memories) -> list[Any]:
    first = m.up(1)
    synchronize(m.device)
    return [first, m.up(2)]


RIGHT: dict[str, tuple[Scenario, list[float]]] = {
    "fenced": (fenced, [2, 4]),
    "blocking": (blocking, [2, 4]),
    "blocked by another copy": (blocked_by_another_copy, [2]),
    "pageable": (pageable, [2]),
    "fresh numbers": (fresh_numbers, [2, 4]),
    "awaited read": (awaited_read, [2, 2]),
    "arrival awaited": (arrival_awaited, [3, 4]),
    "numbers of a launch": (numbers_of_a_launch, [1, 2]),
    "moved within the device": (moved_within_the_device, [2, 4]),
    "fenced replays": (fenced_replays, [1, 2]),
    "launches": (launches, [1, 3]),
    "dropped": (dropped, [2]),
    "synchronised": (synchronised, [2, 4]),
}
WRONG: dict[str, tuple[Scenario, list[float]]] = {
    "rewritten": (rewritten, [4, 4]),
    "fenced too early": (fenced_too_early, [4, 4]),
    "cleared behind the copy": (cleared_behind_the_copy, [0]),
    "moved to the device": (moved_to_the_device, [4]),
    "arrival not awaited": (arrival_not_awaited, [0, 3]),
    "replays": (replays, [2, 2]),
}
"""What the host did too early, and what the device then computes."""
ALL = {**RIGHT, **WRONG}


@contextmanager
def late(memories: Memories) -> Iterator[None]:
    """A device that does nothing while the block sends, unless the block waits."""
    if memories.device.type == "cpu":
        with LateDevice() as device:
            device.owns([memories.x])
            yield
        return
    torch.cuda._sleep(CYCLES)
    yield
    torch.cuda.synchronize()


def outcome(device: torch.device, scenario: Scenario) -> list[float]:
    """First elements of what a scenario made, once everything has run."""
    memories = Memories(device)
    synchronize(device)
    with late(memories):
        made = scenario(memories)
    return [float(one.flatten()[0]) if isinstance(one, torch.Tensor) else float(one) for one in made]


@pytest.mark.parametrize("name", ALL)
def test_a_late_device_shows_what_the_host_did_too_early(name: str) -> None:
    """With a fence, a wait or memory of its own each result is right; without, it is the later number's."""
    scenario, expected = ALL[name]
    assert outcome(CPU, scenario) == expected


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_wrong_where_nothing_is_late(name: str) -> None:
    """The same host code passes on a CPU as it is: that is why the device has to be late."""
    memories = Memories(CPU)
    made = WRONG[name][0](memories)
    assert [float(one.flatten()[0]) if isinstance(one, torch.Tensor) else one for one in made] != WRONG[name][1]


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_a_sleeping_gpu_goes_the_way_of_a_late_device(name: str) -> None:
    """The same numbers, right or wrong."""
    scenario, expected = ALL[name]
    scenario(Memories(CUDA))  # loads every kernel, so that no load waits for the device
    assert outcome(CUDA, scenario) == expected


@pytest.mark.parametrize("name", [*GOOD, *REFUSED])
@pytest.mark.parametrize("inference", [False, True])
def test_a_step_computes_what_it_computes_in_time(name: str, inference: bool) -> None:
    """Operators of all kinds, host reads included, give eager's tensors."""
    step: Step = {**GOOD, **REFUSED}[name]
    setting, seen = Setting(CPU), []
    with LateDevice() as device:
        device.owns([setting.x, setting.lens, setting.table, setting.out])
        with torch.inference_mode(inference):
            for number in range(1, 4):
                setting.turn(number)
                made = step(setting)
                seen.append(_copies((made, setting.lens, setting.out)))
    assert all(_same(a, b) for a, b in zip(seen, _eager(step), strict=True))


def _copies(tree: Any) -> list[Any]:
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in torch.utils._pytree.tree_leaves(tree)]


def _eager(step: Step) -> list[list[Any]]:
    if step in GOOD.values():
        return list(eager(step))
    setting, seen = Setting(CPU), []
    for number in range(1, 4):
        setting.turn(number)
        seen.append(_copies((step(setting), setting.lens, setting.out)))
    return seen


def _same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_nothing_runs_before_somebody_waits() -> None:
    """A result is poison until the device has run; leaving the block waits for all of it."""
    x = torch.zeros(4)
    with LateDevice() as device:
        device.owns([x])
        y, n = x + 1, torch.arange(4, device=CPU) + 1
        with device.on_time():
            assert (y + n).tolist() == [2, 3, 4, 5]
        z = x.add_(1) * 2
        with _as_it_is():
            assert z.isnan().all() and not x.any()
    assert (x.tolist(), z.tolist()) == ([1] * 4, [2] * 4)


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Look at memory without waiting for anybody."""
    token = LATE.set(None)
    yield
    LATE.reset(token)


def test_memory_that_its_owner_dropped_is_somebody_elses() -> None:
    """A launch that reads pinned memory after the last owner is gone reads what the next owner wrote (poison)."""
    found = {}
    for kept in (True, False):
        out = torch.zeros(4)
        with LateDevice():
            staging = torch.full((4,), 7.0)
            mark_pinned(staging)
            record_call(lambda source, target: target.copy_(source), staging, out, mutates=(out,))
            if not kept:
                del staging
        found[kept] = out
    assert (found[True] == 7).all()
    assert found[False].isnan().all()


def test_a_second_round_from_kept_memory_is_not_taken_for_dropped() -> None:
    """Our own references are forgotten when a task has run, so that the owner's is not mistaken for one of them."""
    staging, outs = torch.full((4,), 7.0), [torch.zeros(4) for _ in range(5)]
    mark_pinned(staging)
    with LateDevice() as device:
        for out in outs:
            record_call(lambda source, target: target.copy_(source), staging, out, mutates=(out,))
            device.wait("a test")
    assert all((out == 7).all() for out in outs)


def test_an_arenas_memory_is_what_it_says() -> None:
    """Pinned buffers are read late, host buffers when they are sent, device buffers are sent to."""
    specs = [BufferSpec(m.value, Role.WORKSPACE, (4,), "int32", Unit.BYTES, "by hand", memory=m) for m in Memory]
    with LateDevice():
        arena = Arena.allocate(specs, "cpu", guard=True)
        device, pinned, host = (arena[one.value] for one in (Memory.DEVICE, Memory.PINNED, Memory.HOST))
        device.fill_(1)
        made = []
        for source in (pinned, host):
            source.fill_(2)
            device.copy_(source, non_blocking=True)
            made.append(device.clone())
            source.fill_(3)
        arena.poison()
        assert (pinned == -1).all()
    assert [one.tolist() for one in made] == [[3] * 4, [2] * 4]
    assert (device == -1).all()


def test_waits_are_named() -> None:
    """What stopped the host is on record: reads, blocking copies, fences."""
    x, staging = torch.zeros(4), torch.zeros(4)
    mark_pinned(staging)
    with LateDevice() as device:
        device.owns([x])
        mark = fence("cpu")
        x.add_(1)
        mark.record()
        assert not device.waits
        mark.synchronize()
        x.copy_(staging)
        x.nonzero()
        bool((x == 0).all())
        assert device.waits[:4] == [
            "a fence", "aten.copy_.default between host and device", "aten.nonzero.default", "Tensor.__bool__",
        ]  # fmt: skip


def test_an_error_comes_when_the_device_gets_there() -> None:
    """An index that is out of range is an error of the wait, which names the operator; what was sent behind is lost."""
    x, index = torch.zeros(4), torch.tensor([9])
    with pytest.raises(IndexError) as caught, LateDevice() as device:
        device.owns([x, index])
        x.index_select(0, index)
        x.add_(1)
    assert "ran aten.index_select.default, task 1 of the 2 sent" in caught.value.__notes__[0]
    assert late_device() is None and not x.any()


def test_an_error_of_the_block_leaves_nothing_behind() -> None:
    """What was sent is forgotten, and the thread is on time again."""
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="own"), LateDevice() as device:
        device.owns([x])
        x.add_(1)
        raise ValueError("own")
    assert not x.any() and late_device() is None
    assert (x + 1).tolist() == [1] * 4


def test_a_capture_waits_and_a_replay_does_not() -> None:
    """A graph that is captured meanwhile records what the static tensors hold then; its replays are sent."""
    x = torch.zeros(4)
    with LateDevice() as device:
        device.owns([x])
        x.fill_(3)
        graph = RecordedGraph(lambda: x * 2)
        graph.replay()
        first = graph.outputs.clone()
        x.fill_(5)
        graph.replay()
    assert (first.tolist(), graph.outputs.tolist()) == ([6] * 4, [10] * 4)


def test_one_device_is_late_at_a_time() -> None:
    """A late device inside another would have no order between them."""
    with LateDevice(), pytest.raises(GraphError, match="leave the outer"), LateDevice():
        pass
    assert late_device() is None
