"""Records the kind of memory (device, pinned or host) of each storage. On a CPU the tensor itself does not show it."""

from __future__ import annotations

from enum import Enum, auto
from weakref import WeakSet

from torch import Tensor, UntypedStorage

from draftmark.graphs.active import PINNED_STORAGES
from draftmark_reference.graphs.host_memory import HOST_STORAGES


class Place(Enum):
    """Kinds of memory that a late device distinguishes."""

    DEVICE = auto()
    PINNED = auto()
    """Host memory declared by `mark_pinned`; copies read it when they run."""
    HOST = auto()
    """Other host memory."""
    UNKNOWN = auto()
    """Memory from before the context began, without a declaration."""


class Residency:
    """Records the kind of memory of every known storage."""

    def __init__(self) -> None:
        self._device: WeakSet[UntypedStorage] = WeakSet()
        self._host: WeakSet[UntypedStorage] = WeakSet()
        self._landing: WeakSet[UntypedStorage] = WeakSet()

    def of(self, tensor: Tensor) -> Place:
        """Return a tensor's kind of memory. A declared kind takes precedence over one inferred from use."""
        storage = tensor.untyped_storage()
        if storage in PINNED_STORAGES or storage in self._landing:
            return Place.PINNED
        if storage in HOST_STORAGES:
            return Place.HOST
        if storage in self._device:
            return Place.DEVICE
        return Place.HOST if storage in self._host else Place.UNKNOWN

    def is_pageable(self, tensor: Tensor) -> bool:
        """Return True for memory declared by `mark_host`. Asynchronous copies read it before they return."""
        return tensor.untyped_storage() in HOST_STORAGES

    def on_device(self, tensor: Tensor) -> None:
        """Mark a tensor as device memory because a kernel writes it. A declared kind takes precedence."""
        self._host.discard(tensor.untyped_storage())
        self._device.add(tensor.untyped_storage())

    def on_host(self, tensor: Tensor) -> None:
        """Mark a tensor as host memory, because the host created it."""
        if tensor.untyped_storage() not in self._device:
            self._host.add(tensor.untyped_storage())

    def landing(self, tensor: Tensor) -> None:
        """Mark host memory as the target of an asynchronous copy from the device."""
        self._landing.add(tensor.untyped_storage())
