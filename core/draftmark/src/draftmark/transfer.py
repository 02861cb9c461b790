"""Copies between host and device that do not wait: pinned memory to the device, copies with a fence to the host.

torch's caching host allocator keeps a pinned block until torch's own copies from the block are done, so these functions
need no lifetime management. Memory that is *rewritten* is different: the memory is read when the device executes the
copy. The owner of a staging buffer must wait for a `Fence` before the next write::

    fence.synchronize()                          # the device has read the previous contents (vllm#25279, sglang#28034)
    staging.copy_(numbers)
    on_device.copy_(staging, non_blocking=True)
    fence.record()                               # after the copy, not before it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .devices import present_device
from .errors import BatchError
from .graphs.active import late_device

if TYPE_CHECKING:
    from .graphs.active import LateDevice


QUEUED = frozenset(("cuda", "npu"))
"""Device types with asynchronous copies from and to pinned memory."""


class Fence(Protocol):
    """Mark in a device's stream, with the part of `torch.cuda.Event` that draftmark uses."""

    def record(self) -> None:
        """Mark the current end of the device's current stream; replaces the previous mark."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the mark; returns at once without a mark."""
        ...


def fence(device: torch.device | str) -> Fence:
    """Return a new fence for `device`. On a CPU it never waits, except in tests that simulate a late device."""
    device = present_device("a fence", device)
    if device.type == "cpu":
        return _HostFence()
    return _DeviceFence(device)


class _DeviceFence:
    """Event on a device's own current stream. By default an event takes the stream of torch's current device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._event = self._module.Event()

    def record(self) -> None:
        self._event.record(self._module.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


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
    """Return host numbers as a tensor of `dtype` on `device`; on CUDA and NPU the copy is only enqueued.

    Raises:
        BatchError: the values are not numbers in rows of equal length, or do not fit `dtype`.
        BufferError: `device` is not present.
    """
    device = present_device("a copy", device)
    pinned = device.type in QUEUED
    try:
        host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if type(error) is RuntimeError and "overflow" not in str(error):
            raise  # the device failed, e.g. to pin memory; the values are not wrong
        cause = " ".join(str(error).split())
        raise BatchError(f"values cannot become {dtype} ({cause}); pass numbers in rows of equal length") from None
    return host.to(device, non_blocking=_only_enqueues(device))


class AsyncHostCopy:
    """Asynchronous copies of device tensors to the host.

    The copies are enqueued after the work that writes the tensors. Later work may overwrite the tensors.

    Args:
        tensors: device tensors, all on one device, of any shape and dtype. Read-only.

    Raises:
        BatchError: there is no tensor, or they lie on several devices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors or not all(isinstance(one, torch.Tensor) for one in tensors):
            raise BatchError(f"tensors has {len(tensors)} entries, but it must be one tensor or more; pass a list")
        if len({one.device for one in tensors}) > 1:
            raise BatchError(
                f"tensors lie on {', '.join(sorted({str(one.device) for one in tensors}))}, but one copy reads one "
                "device; make one AsyncHostCopy for each device"
            )
        device = tensors[0].device
        self._arrived = fence(device)
        if not _only_enqueues(device):
            # On a CPU too a copy is needed: a later replay overwrites the graph's outputs.
            self._hosts = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device.type in QUEUED) for t in tensors]
        for host, tensor in zip(self._hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._arrived.record()

    def wait(self) -> list[list[Any]]:
        """Wait for the copies and return each tensor as a nested list."""
        self._arrived.synchronize()
        return [host.tolist() for host in self._hosts]


def _only_enqueues(device: torch.device) -> bool:
    """Return True if copies between host and `device` return before they have run."""
    return device.type in QUEUED or (device.type == "cpu" and late_device() is not None)
