"""Pinned memory from which plans are copied to the device, and the fences that keep a copy from reading the next plan.

A plan is written here by the host and copied by the device when it gets there, which may be much later. Rewritten too
early, the copy of plan n carries plan n + 1 (mini-sglang#103). FlashInfer's own wrappers have one such buffer each and
hide the race behind the waits of their `plan()`; here nothing waits but the fence, and with slots for two rounds it
finds its event long done.

The memory must also outlive its copies. PyTorch's pinned allocator hands a block on as soon as it is dropped, unless
PyTorch itself copied from it; these copies are FlashInfer's. So the slots are kept until their last copies are through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from draftmark.runtime import Fence


class Staging:
    """Slots taken in turn.

    Args:
        memory: uint8 ``[slots, bytes]``, pinned; the arena's.
        fence: makes one fence of the device's.
    """

    def __init__(self, memory: torch.Tensor, fence: Callable[[], Fence]) -> None:
        self._slots = list(memory)
        self._fences = [fence() for _ in self._slots]
        self._next = 0
        weakref.finalize(self, _drain, self._fences, memory).atexit = False

    @contextmanager
    def slot(self) -> Iterator[torch.Tensor]:
        """The next slot, uint8 ``[bytes]``, free to be written; copies out of it are enqueued before the block ends."""
        index, self._next = self._next, (self._next + 1) % len(self._slots)
        self.wait(index)
        yield self._slots[index]
        self._fences[index].record()

    def wait(self, index: int) -> None:
        """Wait for the copies that were enqueued from this slot."""
        self._fences[index].synchronize()


def _drain(fences: Sequence[Fence], memory: torch.Tensor) -> None:
    """Keep `memory` until nothing is copied from it any more."""
    for fence in fences:
        fence.synchronize()
    del memory
