"""Tests of pinned staging: a slot is rewritten only after the device has read it."""

from __future__ import annotations

import torch

from draftmark_cuda_flashinfer.staging import Staging


class Device:
    """Simulated device that runs enqueued copies late and in order."""

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
    """Fence on the simulated device. It passes after the device has run the copies enqueued before `record`."""

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
    """Ten plans written through two staging slots reach the device unchanged, although the device is always late."""
    device = Device()
    staging = Staging(torch.zeros(2, 16, dtype=torch.uint8), lambda: LateFence(device))
    assert send(staging, device, range(10)) == list(range(10))


def test_without_the_fence_copies_carry_later_plans(monkeypatch):
    """If the host did not wait for the fence, the device would copy later plans instead of earlier ones."""
    monkeypatch.setattr(Staging, "wait", lambda self, index: None)
    device = Device()
    staging = Staging(torch.zeros(2, 16, dtype=torch.uint8), lambda: LateFence(device))
    assert send(staging, device, range(10)) != list(range(10))


def test_plans_within_the_slots_do_not_wait():
    """The host does not wait while there are unused slots: it writes one plan per slot before the device copies any."""
    device = Device()
    staging = Staging(torch.zeros(4, 16, dtype=torch.uint8), lambda: LateFence(device))
    for value in range(4):
        with staging.slot() as slot:
            slot.fill_(value)
            device.copy(slot)
    assert device.done == 0


def test_memory_is_kept_until_its_last_copy():
    """After a Staging object is deleted, its memory is kept until the enqueued copies have run."""
    device, memory = Device(), torch.zeros(2, 16, dtype=torch.uint8)
    staging = Staging(memory, lambda: LateFence(device))
    with staging.slot() as slot:
        slot.fill_(7)
        device.copy(slot)
    del slot, staging
    assert device.received == [7]
