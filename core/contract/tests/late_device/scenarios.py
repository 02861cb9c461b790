"""Small sequences of host and device work, each with the result that it gives on a device that runs late.

In the sequences of `RIGHT`, the host waits before it overwrites memory that the device still has to read.
In those of `WRONG`, the host overwrites the memory too early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark.devices import synchronize
from draftmark.graphs import GraphKey, Program, graph_state_for, mark_pinned, record_call
from draftmark.transfer import AsyncHostCopy, fence, to_device
from draftmark_reference.graphs import mark_host

KEY = GraphKey(Program.DECODE, 4)


class Memories:
    """Holds the tensors of one scenario: on a device, in pinned memory, and in pageable memory."""

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
        """Write a value to pinned memory, copy it to the device, and return its double, computed there."""
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


def cleared_after_the_copy(m: Memories) -> list[Any]:
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
    m.staging = m.arrived  # safe: torch reuses a freed pinned block only after torch's own copy from it
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
    "cleared after the copy": (cleared_after_the_copy, [0]),
    "moved to the device": (moved_to_the_device, [4]),
    "arrival not awaited": (arrival_not_awaited, [0, 3]),
    "replays": (replays, [2, 2]),
}
"""Scenarios in which the host continues too early, with the values that the device then computes."""
ALL = {**RIGHT, **WRONG}
