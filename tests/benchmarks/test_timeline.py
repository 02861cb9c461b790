"""Tests of the timeline: the time of a round is exact with and without overlap."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from benchmarks.decode.end_to_end import timeline
from draftmark.runtime import AsyncHostCopy


class Machine:
    """Host that needs `host` seconds per round and device that needs `device` seconds, on one simulated clock."""

    def __init__(self, host: float, device: float, overlap: bool) -> None:
        self.now, self.host, self.device = 0.0, host, device
        self.config = SimpleNamespace(overlap=overlap)
        self._ends: deque[float] = deque()

    def step(self) -> None:
        self.now += self.host
        self._ends.append(max(self.now, self._ends[-1] if self._ends else 0.0) + self.device)
        while len(self._ends) > (1 if self.config.overlap else 0):
            AsyncHostCopy.wait(self)  # type: ignore[arg-type]

    def pause(self) -> None:
        """Wait until every round has ended on the device, and let time pass."""
        self.now = max([self.now, *self._ends]) + 5

    def wait(self) -> list:
        self.now = max(self.now, self._ends.popleft())
        return []


@pytest.mark.parametrize(
    ("host", "device", "overlap", "round_"),
    [(1, 4, True, 4), (4, 1, True, 4), (1, 4, False, 5), (4, 1, False, 5)],
)
@pytest.mark.parametrize("rounds", [1, 12])
def test_round_time_is_exact(monkeypatch, host, device, overlap, round_, rounds):
    """A round takes the longer of both sides with overlap and their sum without; host time excludes waits."""
    machine = Machine(host, device, overlap)
    monkeypatch.setattr(AsyncHostCopy, "wait", Machine.wait)
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    monkeypatch.setattr(timeline.torch.cuda, "synchronize", machine.pause)
    for _ in range(3):
        machine.step()
    machine.pause()
    spent, waited = timeline._host(machine, rounds)
    assert (spent + waited) / rounds == round_
    assert spent / rounds == host
