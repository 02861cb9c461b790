"""Tests of `LateDevice`, a CPU model of an asynchronous GPU: queued work, waits, kinds of memory, errors and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draftmark.arena import Arena
from draftmark.buffers import BufferSpec
from draftmark.errors import GraphError
from draftmark.graphs import mark_pinned, record_call
from draftmark.graphs.active import LATE, late_device
from draftmark.transfer import fence
from draftmark_contract.late_device import LateDevice
from draftmark_reference.graphs import RecordedGraph, mark_host
from plugins.reference.tests.graphs.test_cuda_graph_device import GOOD, REFUSED, Setting, Step, eager

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*GOOD, *REFUSED])
@pytest.mark.parametrize("inference", [False, True])
def test_late_step_equals_eager_step(name: str, inference: bool) -> None:
    """Operators of all kinds, host reads included, give the same results late as in eager mode."""
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


def test_nothing_runs_before_a_wait() -> None:
    """A result is poison (NaN) until the device has run; leaving the `with` block waits for all queued work."""
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
    """Read memory in this block without a wait for the device."""
    token = LATE.set(None)
    yield
    LATE.reset(token)


def test_freed_pinned_memory_is_overwritten() -> None:
    """A queued launch reads poison if the owner of its pinned memory frees the memory before the launch runs."""
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


def test_kept_pinned_memory_is_not_overwritten() -> None:
    """References held by finished tasks are not counted, so pinned memory that still has an owner keeps its values."""
    staging, outs = torch.full((4,), 7.0), [torch.zeros(4) for _ in range(5)]
    mark_pinned(staging)
    with LateDevice() as device:
        for out in outs:
            record_call(lambda source, target: target.copy_(source), staging, out, mutates=(out,))
            device.wait("a test")
    assert all((out == 7).all() for out in outs)


def test_host_memory_has_its_declared_kind() -> None:
    """Queued copies read pinned memory when the device runs, and read pageable host memory when they are queued."""
    specs = [BufferSpec(str(pinned), (4,), "int32", "by hand", pinned=pinned) for pinned in (False, True)]
    with LateDevice():
        arena, host = Arena.allocate(specs, "cpu", guard=True), torch.zeros(4, dtype=torch.int32)
        mark_host(host)
        device, pinned = arena["False"], arena["True"]
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
    """The late device records each wait of the host by name: reads, blocking copies and fences."""
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


def test_error_is_raised_when_the_device_runs() -> None:
    """The wait raises an index error of queued work, names the operator, and drops all work queued after it."""
    x, index = torch.zeros(4), torch.tensor([9])
    with pytest.raises(IndexError) as caught, LateDevice() as device:
        device.owns([x, index])
        x.index_select(0, index)
        x.add_(1)
    assert "ran aten.index_select.default, task 1 of the 2 sent" in caught.value.__notes__[0]
    assert late_device() is None and not x.any()


def test_error_in_the_block_drops_queued_work() -> None:
    """An exception in the `with` block drops queued work and removes the thread's late device."""
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="own"), LateDevice() as device:
        device.owns([x])
        x.add_(1)
        raise ValueError("own")
    assert not x.any() and late_device() is None
    assert (x + 1).tolist() == [1] * 4


def test_capture_waits_and_replay_does_not() -> None:
    """A capture waits for queued work and reads the static tensors at once; replays of it are queued."""
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


def test_late_devices_cannot_be_nested() -> None:
    """Entering a late device inside another late device raises an error."""
    with LateDevice(), pytest.raises(GraphError, match="leave it before"), LateDevice():
        pass
    assert late_device() is None
