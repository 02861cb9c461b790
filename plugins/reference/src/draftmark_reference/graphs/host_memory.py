"""Declaration of pageable host memory, which a CPU tensor does not show."""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor, UntypedStorage

HOST_STORAGES: WeakSet[UntypedStorage] = WeakSet()


def mark_host(tensor: Tensor) -> None:
    """Mark a CPU tensor as pageable host memory, for graphs recorded on the CPU.

    An operator that uses the tensor's storage in a recorded region then raises CaptureError, as a copy from pageable
    memory would on a device.
    """
    HOST_STORAGES.add(tensor.untyped_storage())
