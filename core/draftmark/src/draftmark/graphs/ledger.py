"""The storages that one capture touches: whose they are, what they held before, who still holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..errors import GraphError

_POISON_FLOAT = 0xFF  # all bytes 0xFF are a NaN in every floating-point format torch has, save the 8-bit fnuz ones
_POISON_INT = 0x7A  # 0x7A7A7A7A in int32: far out of range for an index, and easy to recognise
_POISON_BOOL = 0x01


@dataclass(frozen=True)
class OutsideStorage:
    """A storage of the caller's, as capture found it."""

    alias: Tensor
    """Our own tensor on the storage."""
    operator: str
    """The first operator that used it."""
    address: int

    @property
    def moved(self) -> bool:
        """Whether the storage was re-allocated since."""
        return self.alias.untyped_storage().data_ptr() != self.address

    @property
    def label(self) -> str:
        return f"the {self.alias.dtype} tensor {list(self.alias.shape)} used by {self.operator}"

    def check(self, own: int) -> None:
        """Raise GraphError unless the caller still holds the storage where it was; `own` references are ours."""
        if references(self.alias) <= own:
            raise GraphError(
                f"{self.label} was freed after capture, so a device would read whatever lies there now; "
                "keep every static tensor alive as long as its graphs"
            )
        if self.moved:
            raise GraphError(
                f"{self.label} was re-allocated after capture, so a device would still use its old address; "
                "allocate static tensors once, at their largest size"
            )


class StorageLedger:
    """Sorts storages into *outside* (they existed before capture) and *inside* (the capture made them).

    Outside storages are put back as they were when capture ends, and each replay checks that the caller still holds
    them. Inside storages are the graph's pool, poisoned when capture ends.
    """

    def __init__(self) -> None:
        self._outside: dict[int, OutsideStorage] = {}
        self._inside: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._own: Counter[int] = Counter()

    def read(self, tensor: Tensor, operator: str) -> None:
        """Note an operand; one whose storage is new here existed before the capture."""
        if not self.knows(tensor):
            address = tensor.untyped_storage().data_ptr()
            self._outside[storage_key(tensor)] = OutsideStorage(self.alias(tensor), operator, address)

    def made(self, tensor: Tensor) -> Tensor:
        """Note a tensor that the capture allocated; an alias of it."""
        alias = self._inside[storage_key(tensor)] = self.alias(tensor)
        return alias

    def constant(self, tensor: Tensor) -> None:
        """Note a host scalar: a graph bakes its value in, so it is neither poisoned nor checked."""
        self._constants[storage_key(tensor)] = self.alias(tensor)

    def is_constant(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._constants

    def knows(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._outside or key in self._inside or key in self._constants

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor of our own on the same storage.

        Keeping the caller's object instead would keep the storage alive in the caller's place, and hide that it was
        dropped: the number of aliases is what tells our references from the caller's.
        """
        self._own[storage_key(tensor)] += 1
        return tensor.detach()

    def before_write(self, tensor: Tensor) -> None:
        """Save an outside storage ahead of its first write."""
        key = storage_key(tensor)
        if key in self._outside and key not in self._before:
            self._before[key] = storage_bytes(tensor).clone()

    def moved(self, tensor: Tensor) -> bool:
        """Whether an operator re-allocated an outside storage."""
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

    def poison(self) -> None:
        """Fill the pool with NaN and large integers: what no replay has written must not look plausible."""
        for tensor in self._inside.values():
            storage_bytes(tensor).fill_(poison_byte(tensor.dtype))

    @property
    def pool_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._inside.values())

    def storages(self) -> list[Tensor]:
        """An alias of every storage that the capture met, but for numbers; call before `watches`."""
        return [self.alias(one.alias) for one in self._outside.values()] + list(self._inside.values())

    def watches(self) -> list[tuple[OutsideStorage, int]]:
        """Each outside storage with the number of our own references; call once no more aliases will be made."""
        return [(outside, self._own[key]) for key, outside in self._outside.items() if outside.address]


def storage_bytes(tensor: Tensor) -> Tensor:
    """A tensor's whole storage as uint8 ``[nbytes]``, whatever part of it the tensor shows."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def storage_key(tensor: Tensor) -> int:
    """What tells a tensor's storage from every other one that is alive."""
    # The storage's own address in C++: unique while it lives, which our aliases see to.
    key: int = tensor.untyped_storage()._cdata
    return key


def references(tensor: Tensor) -> int:
    """How many tensors share the storage of `tensor`, itself included."""
    count: int = torch._C._storage_Use_Count(storage_key(tensor))
    return count - _wrapper_references()


@cache
def _wrapper_references() -> int:
    """What a storage's Python object, which `storage_key` makes, adds to its use count; depends on torch's version."""
    alone = torch.empty(1)
    count: int = torch._C._storage_Use_Count(storage_key(alone))
    return count - 1


def poison_byte(dtype: torch.dtype) -> int:
    """What fills memory of `dtype` that nobody has written."""
    if dtype is torch.bool:
        return _POISON_BOOL
    return _POISON_FLOAT if dtype.is_floating_point or dtype.is_complex else _POISON_INT
