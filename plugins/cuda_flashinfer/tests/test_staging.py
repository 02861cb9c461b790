"""Pinned memory is rewritten only when the device has read it."""

from __future__ import annotations

import torch

from draftmark_cuda_flashinfer.staging import Staging


class Device:
    """A device that runs copies when it is asked to, in order: what was enqueued is read late."""

    def __init__(self):
        self.queue: list = []
        self.received: list[int] = []
        self.done = 0

    def copy(self, slot):
        self.queue.append(lambda: self.received.append(int(slot[0])))

    def run(self, upto):
        while self.done < min(upto, len(self.queue)):
            self.queue[self.done]()
            self.done += 1


class LateFence:
    """Passed when the device has run what was enqueued before it was recorded."""

    def __init__(self, device):
        self.device, self.mark = device, 0

    def record(self):
        self.mark = len(self.device.queue)

    def synchronize(self):
        self.device.run(self.mark)


def send(staging, device, values):
    for value in values:
        with staging.slot() as slot:
            slot.fill_(value)
            device.copy(slot)
    device.run(len(device.queue))
    return device.received


def test_each_copy_carries_its_own_plan():
    """Ten plans through two slots on a device that is always late."""
    device = Device()
    staging = Staging(torch.zeros(2, 16, dtype=torch.uint8), lambda: LateFence(device))
    assert send(staging, device, range(10)) == list(range(10))


def test_without_the_fence_copies_carry_later_plans(monkeypatch):
    """The race that the fence prevents: with waiting taken out, the same ten arrive wrong."""
    monkeypatch.setattr(Staging, "wait", lambda self, index: None)
    device = Device()
    staging = Staging(torch.zeros(2, 16, dtype=torch.uint8), lambda: LateFence(device))
    assert send(staging, device, range(10)) != list(range(10))


def test_a_round_of_plans_waits_for_nothing():
    """As many plans as there are slots are written while the device has run none of them."""
    device = Device()
    staging = Staging(torch.zeros(4, 16, dtype=torch.uint8), lambda: LateFence(device))
    for value in range(4):
        with staging.slot() as slot:
            slot.fill_(value)
            device.copy(slot)
    assert device.done == 0


def test_memory_is_kept_until_its_last_copy_is_through():
    """Dropped with copies on their way, the slots stay: another owner of the block would fill it under them."""
    device, memory = Device(), torch.zeros(2, 16, dtype=torch.uint8)
    staging = Staging(memory, lambda: LateFence(device))
    with staging.slot() as slot:
        slot.fill_(7)
        device.copy(slot)
    del slot, staging
    assert device.received == [7]
