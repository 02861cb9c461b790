"""Between host and device without waiting: numbers go up through pinned memory, results come down behind a fence.

torch's caching host allocator keeps a pinned block until the copies that torch made from it are done, so nothing here
has to outlive its copy by hand. Memory that is *rewritten* is another matter: a copy reads it when the device gets
there. Whoever keeps a staging buffer waits for a `Fence` before using it again::

    fence.synchronize()                          # the device has read what is there (vllm#25279, sglang#28034)
    staging.copy_(numbers)
    on_device.copy_(staging, non_blocking=True)
    fence.record()                               # behind the copy, not before it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .graphs import late_device

if TYPE_CHECKING:
    from .graphs.active import LateDevice


QUEUED = frozenset(("cuda", "npu"))
"""Device types whose copies from and to pinned memory are enqueued."""


class Fence(Protocol):
    """A mark in a stream. What `torch.cuda.Event` has of use here."""

    def record(self) -> None:
        """Mark the present end of the current stream; what was marked before is forgotten."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the mark; at once if there is none."""
        ...


def fence(device: torch.device | str) -> Fence:
    """A fence of a device's own kind; on a CPU one that passes at once, unless the CPU plays a late device."""
    device = torch.device(device)
    if device.type == "cpu":
        return _HostFence()
    made: Fence = torch.get_device_module(device).Event()
    return made


class _HostFence:
    def __init__(self) -> None:
        self._device: LateDevice | None = None
        self._mark = 0

    def record(self) -> None:
        self._device = late_device()
        self._mark = 0 if self._device is None else self._device.mark()

    def synchronize(self) -> None:
        if self._device is not None:
            self._device.wait("a fence", self._mark)


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of host numbers on `device`; on CUDA and on an NPU the copy is only enqueued."""
    device = torch.device(device)
    pinned = device.type in QUEUED
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=_only_enqueues(device))


class AsyncHostCopy:
    """Copies of device tensors, on their way to the host.

    The copies are enqueued behind the work that makes the tensors, which may be overwritten by what follows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        self._arrived = fence(device)
        if not _only_enqueues(device):
            # A copy, although nothing is late here: a later replay overwrites what the graph returned.
            self._hosts = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device.type in QUEUED) for t in tensors]
        for host, tensor in zip(self._hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._arrived.record()

    def wait(self) -> list[list[Any]]:
        """The tensors as lists; waits until they are here."""
        self._arrived.synchronize()
        return [host.tolist() for host in self._hosts]


def _only_enqueues(device: torch.device) -> bool:
    """Whether copies between host and `device` return before they have run."""
    return device.type in QUEUED or (device.type == "cpu" and late_device() is not None)
