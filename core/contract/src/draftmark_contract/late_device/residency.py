"""Kind of memory of each storage (device, pinned or host), which on a CPU cannot be read from the tensor."""

from __future__ import annotations

from enum import Enum, auto
from weakref import WeakSet

from torch import Tensor, UntypedStorage

from draftmark.graphs.active import HOST_STORAGES, PINNED_STORAGES


class Place(Enum):
    """Kinds of memory."""

    DEVICE = auto()
    PINNED = auto()
    """Host memory declared by `mark_pinned`; copies read it when they run."""
    HOST = auto()
    """Other host memory."""
    UNKNOWN = auto()
    """Memory from before the context began, without a declaration."""


class Residency:
    """Kinds of memory of all known storages."""

    def __init__(self) -> None:
        self._device: WeakSet[UntypedStorage] = WeakSet()
        self._host: WeakSet[UntypedStorage] = WeakSet()
        self._landing: WeakSet[UntypedStorage] = WeakSet()

    def of(self, tensor: Tensor) -> Place:
        """Return a tensor's kind of memory. A declaration takes precedence over an observation."""
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
        """Mark a tensor as device memory, since a kernel writes it. A declaration takes precedence."""
        self._host.discard(tensor.untyped_storage())
        self._device.add(tensor.untyped_storage())

    def on_host(self, tensor: Tensor) -> None:
        """Mark a tensor as created by the host."""
        if tensor.untyped_storage() not in self._device:
            self._host.add(tensor.untyped_storage())

    def landing(self, tensor: Tensor) -> None:
        """Mark host memory as the target of an asynchronous copy."""
        self._landing.add(tensor.untyped_storage())
