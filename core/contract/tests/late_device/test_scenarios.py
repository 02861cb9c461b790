"""Tests that a late device gives the results of a real one: each scenario also runs on a GPU that sleeps first.

Host tests fix the results on a `LateDevice`, right or wrong. Device tests require equal results from a CUDA stream.
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
    """Make the device do nothing while the block sends work, unless the block waits."""
    if memories.device.type == "cpu":
        with LateDevice() as device:
            device.owns([memories.x])
            yield
        return
    torch.cuda._sleep(CYCLES)
    yield
    torch.cuda.synchronize()


def outcome(device: torch.device, scenario: Scenario) -> list[float]:
    """Return the first elements of a scenario's results after all work has run."""
    memories = Memories(device)
    synchronize(device)
    with late(memories):
        made = scenario(memories)
    return [float(one.flatten()[0]) if isinstance(one, torch.Tensor) else float(one) for one in made]


@pytest.mark.parametrize("name", ALL)
def test_late_device_shows_early_host_writes(name: str) -> None:
    """A scenario with a wait or separate memory is right; otherwise the device reads a number written too early."""
    scenario, expected = ALL[name]
    assert outcome(CPU, scenario) == expected


@pytest.mark.parametrize("name", WRONG)
def test_early_host_writes_pass_without_lateness(name: str) -> None:
    """On a plain CPU, without a late device, the wrong scenarios do not give their wrong results."""
    memories = Memories(CPU)
    made = WRONG[name][0](memories)
    assert [float(one.flatten()[0]) if isinstance(one, torch.Tensor) else one for one in made] != WRONG[name][1]


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_sleeping_gpu_equals_late_device(name: str) -> None:
    """A CUDA stream with a sleeping kernel in front gives the results of a late device."""
    scenario, expected = ALL[name]
    scenario(Memories(CUDA))  # loads every kernel, so that no load waits for the device
    assert outcome(CUDA, scenario) == expected
