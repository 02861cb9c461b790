"""Tests of the timeline, which derives the time of a decoding round, with and without overlap of host and device."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from benchmarks.decode.end_to_end import timeline
from draftmark.runtime import AsyncHostCopy


class Machine:
    """Simulated machine: the host needs `host` seconds per round and the device `device` seconds, on one clock."""

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
        """Advance the clock until every round has ended on the device."""
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
    """With overlap a round takes the longer time of host and device, else their sum; host time excludes waits."""
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
