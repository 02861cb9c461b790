"""Where a storage lies, as a device would have it: on a CPU all memory looks alike."""

from __future__ import annotations

from enum import Enum, auto
from weakref import WeakSet

from torch import Tensor, UntypedStorage

from draftmark.graphs.active import HOST_STORAGES, PINNED_STORAGES


class Place(Enum):
    """What a device would find a storage to be."""

    DEVICE = auto()
    PINNED = auto()
    """Host memory that copies read when they run: declared by `mark_pinned`."""
    HOST = auto()
    """Other host memory."""
    UNKNOWN = auto()
    """Nobody has said: it was there before anybody watched."""


class Residency:
    """The places of all storages that somebody has placed."""

    def __init__(self) -> None:
        self._device: WeakSet[UntypedStorage] = WeakSet()
        self._host: WeakSet[UntypedStorage] = WeakSet()
        self._landing: WeakSet[UntypedStorage] = WeakSet()

    def of(self, tensor: Tensor) -> Place:
        """Where a tensor lies. What was declared counts more than what was seen."""
        storage = tensor.untyped_storage()
        if storage in PINNED_STORAGES or storage in self._landing:
            return Place.PINNED
        if storage in HOST_STORAGES:
            return Place.HOST
        if storage in self._device:
            return Place.DEVICE
        return Place.HOST if storage in self._host else Place.UNKNOWN

    def is_pageable(self, tensor: Tensor) -> bool:
        """Whether the storage is declared pageable (`mark_host`): even an asynchronous copy has read it on return."""
        return tensor.untyped_storage() in HOST_STORAGES

    def on_device(self, tensor: Tensor) -> None:
        """A tensor that a device must hold, since its kernels write it. A declaration stays."""
        self._host.discard(tensor.untyped_storage())
        self._device.add(tensor.untyped_storage())

    def on_host(self, tensor: Tensor) -> None:
        """A tensor that the host made for itself."""
        if tensor.untyped_storage() not in self._device:
            self._host.add(tensor.untyped_storage())

    def landing(self, tensor: Tensor) -> None:
        """Host memory that an asynchronous copy writes."""
        self._landing.add(tensor.untyped_storage())
