"""Tests that `LateDevice` gives the results of a real GPU that a sleep kernel keeps busy first.

Host tests compare each scenario on a `LateDevice` with its expected result, right or wrong.
Device tests require equal results from a CUDA stream.
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
"""GPU clock cycles, about 50 ms. A scenario needs less than 1 ms to send its work."""


@contextmanager
def late(memories: Memories) -> Iterator[None]:
    """Keep the device from running work that the block sends, until the block waits or ends."""
    if memories.device.type == "cpu":
        with LateDevice() as device:
            device.owns([memories.x])
            yield
        return
    torch.cuda._sleep(CYCLES)
    yield
    torch.cuda.synchronize()


def outcome(device: torch.device, scenario: Scenario) -> list[float]:
    """Run a scenario on a late device; return the first element of each of its results."""
    memories = Memories(device)
    synchronize(device)
    with late(memories):
        made = scenario(memories)
    return [float(one.flatten()[0]) if isinstance(one, torch.Tensor) else float(one) for one in made]


@pytest.mark.parametrize("name", ALL)
def test_late_device_shows_early_host_writes(name: str) -> None:
    """A scenario that waits gives the right result; without a wait, the device reads what the host wrote too early."""
    scenario, expected = ALL[name]
    assert outcome(CPU, scenario) == expected


@pytest.mark.parametrize("name", WRONG)
def test_early_host_writes_pass_without_lateness(name: str) -> None:
    """Without a late device, CPU results do not show the defects of the wrong scenarios."""
    memories = Memories(CPU)
    made = WRONG[name][0](memories)
    assert [float(one.flatten()[0]) if isinstance(one, torch.Tensor) else one for one in made] != WRONG[name][1]


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_sleeping_gpu_equals_late_device(name: str) -> None:
    """A CUDA stream that first runs a sleep kernel gives the results of a late device."""
    scenario, expected = ALL[name]
    scenario(Memories(CUDA))  # the first run loads every kernel; loading a kernel later would wait for the device
    assert outcome(CUDA, scenario) == expected
