"""Pinned staging memory for plans, with fences that prevent a copy from reading a later plan.

The host writes a plan here and the device copies it, possibly much later. If the host overwrites it too early, the
copy of plan n contains plan n + 1 (mini-sglang#103). Each wrapper of FlashInfer has one such buffer, and its `plan()`
waits for the device. Here the host waits only for the copy out of the slot that it reuses. With slots for two rounds
that copy has usually finished long before.

The memory must also outlive its copies. PyTorch's pinned allocator reuses a freed block at once, unless PyTorch itself
copied from it. FlashInfer makes these copies, so the slots are kept until their last copies have finished.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from draftmark.runtime import Fence


class Staging:
    """Gives out pinned staging slots in a ring, and waits until the device has read a slot before its reuse.

    Args:
        memory: uint8 ``[slots, bytes]``, pinned; owned by the arena.
        fence: function that creates a fence on the device.
    """

    def __init__(self, memory: torch.Tensor, fence: Callable[[], Fence]) -> None:
        self._slots = list(memory)
        self._fences = [fence() for _ in self._slots]
        self._next = 0
        weakref.finalize(self, _drain, self._fences, memory).atexit = False

    @contextmanager
    def slot(self) -> Iterator[torch.Tensor]:
        """Yield the next free slot, uint8 ``[bytes]``. The caller enqueues its copies within the `with` block."""
        index, self._next = self._next, (self._next + 1) % len(self._slots)
        self.wait(index)
        yield self._slots[index]
        self._fences[index].record()

    def wait(self, index: int) -> None:
        """Wait for the copies that were enqueued from slot `index`."""
        self._fences[index].synchronize()


def _drain(fences: Sequence[Fence], memory: torch.Tensor) -> None:
    """Keep `memory` until all copies from it have finished."""
    for fence in fences:
        fence.synchronize()
    del memory
