"""Storages that one capture uses: their owner, their contents before the capture, and their references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftmark import GraphError

_POISON_FLOAT = 0xFF  # bytes 0xFF are NaN in every float format of torch, except the 8-bit fnuz formats
_POISON_INT = 0x7A  # 0x7A7A7A7A in int32: out of range for any index, and easy to recognize
_POISON_BOOL = 0x01


@dataclass(frozen=True)
class OutsideStorage:
    """A storage that existed before the capture."""

    alias: Tensor
    """The ledger's own tensor on the storage."""
    operator: str
    """First operator that used the storage."""
    address: int

    @property
    def moved(self) -> bool:
        """True if the storage was re-allocated after the capture."""
        return self.alias.untyped_storage().data_ptr() != self.address

    @property
    def label(self) -> str:
        """Description of the storage's tensor in errors."""
        return f"the {self.alias.dtype} tensor {list(self.alias.shape)} used by {self.operator}"

    def check(self, own: int) -> None:
        """Raise GraphError if the caller freed or re-allocated the storage; the graph itself has `own` references."""
        if references(self.alias) <= own:
            raise GraphError(
                f"{self.label} was freed after capture, so a device would read other data at its address; "
                "keep every static tensor alive as long as its graphs"
            )
        if self.moved:
            raise GraphError(
                f"{self.label} was re-allocated after capture, so a device would still use its old address; "
                "allocate static tensors once, at their largest size"
            )


class StorageLedger:
    """Record of *outside* storages, which existed before the capture, and *inside* storages, which it allocated.

    The end of a capture restores the contents of outside storages. Each replay checks that the caller still has
    references to them. Inside storages form the graph's memory pool and are poisoned at the end of the capture.
    """

    def __init__(self) -> None:
        self._outside: dict[int, OutsideStorage] = {}
        self._inside: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._own: Counter[int] = Counter()

    def read(self, tensor: Tensor, operator: object) -> None:
        """Record an operand of an operator. If its storage is not recorded yet, it existed before the capture.

        Args:
            operator: the operator, or its name; errors print it.
        """
        if not self.contains(tensor):
            address = tensor.untyped_storage().data_ptr()
            self._outside[storage_key(tensor)] = OutsideStorage(self.alias(tensor), str(operator), address)

    def made(self, tensor: Tensor) -> Tensor:
        """Record a tensor that the capture allocated, and return an alias of it."""
        alias = self._inside[storage_key(tensor)] = self.alias(tensor)
        return alias

    def constant(self, tensor: Tensor) -> None:
        """Record a host scalar: a graph keeps its value, so its storage is neither poisoned nor checked."""
        self._constants[storage_key(tensor)] = self.alias(tensor)

    def is_constant(self, tensor: Tensor) -> bool:
        """Return True if the storage of `tensor` is a host scalar of the capture."""
        return storage_key(tensor) in self._constants

    def contains(self, tensor: Tensor) -> bool:
        """Return True if the storage of `tensor` is recorded."""
        key = storage_key(tensor)
        return key in self._outside or key in self._inside or key in self._constants

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a new tensor on the storage of `tensor`, and count it as a reference of the graph.

        If the graph kept the caller's tensor object, the storage would look used after the caller drops it. A storage
        with more references than counted aliases is still used by the caller.
        """
        self._own[storage_key(tensor)] += 1
        return tensor.detach()

    def before_write(self, tensor: Tensor) -> None:
        """Save the contents of an outside storage before its first write."""
        key = storage_key(tensor)
        if key in self._outside and key not in self._before:
            self._before[key] = storage_bytes(tensor).clone()

    def moved(self, tensor: Tensor) -> bool:
        """Return True if the tensor's storage existed before the capture and was re-allocated since."""
        outside = self._outside.get(storage_key(tensor))
        return outside is not None and outside.moved

    def restore(self) -> None:
        """Undo every write to outside storages."""
        for key, saved in self._before.items():
            alias = self._outside[key].alias
            if alias.untyped_storage().nbytes() != saved.numel():
                alias.untyped_storage().resize_(saved.numel())
            storage_bytes(alias).copy_(saved)
        self._before.clear()

    def inside(self) -> list[Tensor]:
        """Return an alias of every storage that the capture allocated: the graph's memory pool."""
        return list(self._inside.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes of all inside storages."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._inside.values())

    def storages(self) -> list[Tensor]:
        """Return an alias of every storage of the capture, except host scalars; call it before `watches`."""
        return [self.alias(one.alias) for one in self._outside.values()] + list(self._inside.values())

    def watches(self) -> list[tuple[OutsideStorage, int]]:
        """Return each outside storage and the graph's number of references to it; call it after the last `alias`."""
        return [(outside, self._own[key]) for key, outside in self._outside.items() if outside.address]


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill whole storages with NaN and large integers, so that data that no replay wrote is recognizable."""
    for tensor in tensors:
        storage_bytes(tensor).fill_(poison_byte(tensor.dtype))


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as uint8 ``[nbytes]``, also for a view of a part."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def storage_key(tensor: Tensor) -> int:
    """Return an integer that identifies a tensor's storage among all live storages."""
    # Address of the C++ storage object: unique while the storage is alive, and the ledger's aliases keep it alive.
    key: int = tensor.untyped_storage()._cdata
    return key


def references(tensor: Tensor) -> int:
    """Return the number of tensors that share the storage of `tensor`, itself included."""
    count: int = torch._C._storage_Use_Count(storage_key(tensor))
    return count - _wrapper_references()


@cache
def _wrapper_references() -> int:
    """Return the use count that torch's Python storage object itself adds, which depends on torch's version."""
    single = torch.empty(1)
    count: int = torch._C._storage_Use_Count(storage_key(single))
    return count - 1


def poison_byte(dtype: torch.dtype) -> int:
    """Return the byte that fills uninitialized memory of `dtype`."""
    if dtype is torch.bool:
        return _POISON_BOOL
    return _POISON_FLOAT if dtype.is_floating_point or dtype.is_complex else _POISON_INT
