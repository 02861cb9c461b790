"""A late device against the real thing: every scenario must go alike behind a GPU that sleeps.

The host tests fix what a `LateDevice` shows, right or wrong; the device tests demand the same of a CUDA stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from draftmark.devices import synchronize
from draftmark_contract.late_device import LateDevice

from .scenarios import ALL, WRONG, Memories, Scenario

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CYCLES = 100_000_000
"""Of a GPU's clock: some 50 ms, where a scenario sends for less than one."""


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
