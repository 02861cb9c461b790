"""Where each argument of a compiled kernel goes among the parameters that the driver takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from .native import Captured, Driver, DriverError, Launch
from .starting import ALIGNED

MOST_MAPS = 1024
"""Addresses whose copy descriptors are remembered at a time."""
WORDS = {4: "f", 8: "d"}
"""Floating point of so many bytes, as `struct` names it."""


@dataclass(frozen=True)
class Address:
    """What a descriptor says of its tensor: it must not keep the memory of another step or layer alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As of the tensor."""
        return self.address


def is_box(value: Any) -> bool:
    """Whether an argument is a descriptor of what the copy engine copies."""
    return hasattr(value, "block_shape")


def moved(descriptor: Any, address: int) -> Any:
    """The descriptor of a tensor at `address`, like that of another."""
    found = copy(descriptor)
    found.base = Address(address, descriptor.base.dtype)
    return found


class Template:
    """One compiled kernel, and the parameters of any launch of it with descriptors of the same tensors' layout.

    What is not a parameter was compiled in, and is the same in every launch of the kernel.

    Args:
        compiled: Triton's. grid, args: of a launch of it.

    Raises:
        DriverError: the driver does not tell, or not all.
    """

    def __init__(self, driver: Driver, compiled: Any, grid: Sequence[int], args: Sequence[Any], device: int) -> None:
        self._driver, self._device = driver, device
        self._run = compiled[tuple(grid)]
        self._dependent = bool(compiled.metadata.launch_pdl)
        metadata = compiled.metadata
        if any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
            raise DriverError("a kernel with scratch memory is given another one at every launch")
        plain = [self._plain(one) for one in args]
        self._args = plain
        self._like = like = self._captured(plain)
        self._across = like.grid[0] // grid[0]
        self._place = self._places([self._mark(place, one) for place, one in enumerate(plain)])
        self._boxes = [place for place, one in enumerate(plain) if is_box(one)]
        longer = [place for place, one in enumerate(like.params) if len(one) > 8]
        if len(longer) != len(self._boxes):
            raise DriverError(f"{len(self._boxes)} copy descriptors are {len(longer)} parameters")
        self._box_params = dict(zip(self._boxes, longer, strict=True))
        self._maps: dict[int, dict[int, int]] = {place: {} for place in self._boxes}
        self._kept: dict[int, list[Any]] = {place: [] for place in self._boxes}
        if self._packed(plain) != list(like.params):
            raise DriverError("what was found of the parameters does not make them")

    def launch(self, grid: Sequence[int], args: Sequence[Any]) -> Launch:
        """Prepare a launch."""
        params = self._packed([self._plain(one) for one in args])
        return Launch(self._driver, self._like, (grid[0] * self._across, *grid[1:]), params, self._dependent)

    def param(self, place: int) -> int:
        """Which parameter an argument is that is an address or a descriptor."""
        return self._box_params[place] if place in self._box_params else self._place[place]

    def maps(self, addresses: dict[int, int]) -> None:
        """Have the driver's descriptors of tensors at other addresses, by the argument; see `known`."""
        args = [moved(one, addresses[n]) if n in addresses else one for n, one in enumerate(self._args)]
        params = self._captured(args).params
        for place, address in addresses.items():
            known, bits = self._maps[place], params[self._box_params[place]]
            if len(known) >= MOST_MAPS:
                known.clear()
                self._kept[place].clear()
            self._kept[place].append((ctypes.c_char * len(bits)).from_buffer_copy(bits))
            known[address] = ctypes.addressof(self._kept[place][-1])

    def known(self, place: int) -> dict[int, int]:
        """Where the descriptors of an argument are in the host's memory, by the address of the tensor."""
        return self._maps[place]

    def _captured(self, args: Sequence[Any]) -> Captured:
        return self._driver.captured(lambda stream: self._run(*args, stream=stream), self._device)

    def _places(self, marked: Sequence[Any]) -> dict[int, int]:
        """Which parameter each argument is, of those that are one: each is looked for by a value of its own."""
        params = self._captured(marked).params
        found: dict[int, int] = {}
        for place, value in enumerate(marked):
            if type(value) not in (int, float):
                continue
            which = [n for n, one in enumerate(params) if len(one) <= 8 and one == _bits(value, len(one))]
            # A whole number that is not there is compiled in; one of floating point never is.
            if len(which) > 1 or (type(value) is float and not which):
                raise DriverError(f"argument {place} is found {len(which)} times among the parameters")
            found.update((place, n) for n in which)
        return found

    def _packed(self, args: Sequence[Any]) -> list[bytes]:
        params = list(self._like.params)
        for place, which in self._place.items():
            params[which] = _bits(args[place], len(params[which]))
        return params

    @staticmethod
    def _plain(value: Any) -> Any:
        """An argument that keeps no memory of anybody alive."""
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        return moved(value, value.base.data_ptr()) if is_box(value) else value

    @staticmethod
    def _mark(place: int, value: Any) -> Any:
        """A value that no other argument has: numbers of 31 bits, which fit addresses as well."""
        if type(value) is int:
            return 0x50000000 + ALIGNED * place
        return 1024.5 + place if type(value) is float else value


def _bits(value: Any, size: int) -> bytes:
    """A number as a parameter of so many bytes; none of that size if it is floating point, and not 4 or 8."""
    if type(value) is float:
        return struct.pack(f"<{WORDS[size]}", value) if size in WORDS else b""
    return int(value).to_bytes(8, "little", signed=value < 0)[:size]
