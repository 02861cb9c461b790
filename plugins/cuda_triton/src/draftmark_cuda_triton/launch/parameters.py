"""Launch template of a compiled kernel: the driver parameter that each kernel argument becomes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from .cuda_driver import CapturedLaunch, Driver, DriverError, PreparedLaunch
from .launcher import ALIGNMENT

MAX_DESCRIPTORS = 1024
"""Addresses whose copy descriptors are remembered at a time."""
FLOAT_FORMATS = {4: "f", 8: "d"}
"""Floating point of so many bytes, as `struct` names it."""


@dataclass(frozen=True)
class TensorAddress:
    """What a descriptor says of its tensor: it must not keep the memory of another step or layer alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As of the tensor."""
        return self.address


def is_descriptor(value: Any) -> bool:
    """Whether an argument is a descriptor of what the copy engine copies."""
    return hasattr(value, "block_shape")


def with_address(descriptor: Any, address: int) -> Any:
    """The descriptor of a tensor at `address`, like that of another."""
    found = copy(descriptor)
    found.base = TensorAddress(address, descriptor.base.dtype)
    return found


class LaunchTemplate:
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
        values = [self._without_tensor(one) for one in args]
        self._args = values
        self._captured_launch = captured = self._capture(values)
        self._grid_factor = captured.grid[0] // grid[0]
        self._param_of_arg = self._find_params([self._marker(arg, one) for arg, one in enumerate(values)])
        self._descriptor_args = [arg for arg, one in enumerate(values) if is_descriptor(one)]
        longer = [arg for arg, one in enumerate(captured.params) if len(one) > 8]
        if len(longer) != len(self._descriptor_args):
            raise DriverError(f"{len(self._descriptor_args)} copy descriptors are {len(longer)} parameters")
        self._descriptor_params = dict(zip(self._descriptor_args, longer, strict=True))
        self._encoded: dict[int, dict[int, int]] = {arg: {} for arg in self._descriptor_args}
        self._buffers: dict[int, list[Any]] = {arg: [] for arg in self._descriptor_args}
        if self._pack(values) != list(captured.params):
            raise DriverError("what was found of the parameters does not make them")

    def launch(self, grid: Sequence[int], args: Sequence[Any]) -> PreparedLaunch:
        """Prepare a launch."""
        params = self._pack([self._without_tensor(one) for one in args])
        return PreparedLaunch(
            self._driver, self._captured_launch, (grid[0] * self._grid_factor, *grid[1:]), params, self._dependent
        )

    def param_index(self, arg: int) -> int:
        """Which parameter an argument is that is an address or a descriptor."""
        return self._descriptor_params[arg] if arg in self._descriptor_params else self._param_of_arg[arg]

    def encode_descriptors(self, addresses: dict[int, int]) -> None:
        """Have the driver's descriptors of tensors at other addresses, by the argument; see `encoded_descriptors`."""
        args = [with_address(one, addresses[n]) if n in addresses else one for n, one in enumerate(self._args)]
        params = self._capture(args).params
        for arg, address in addresses.items():
            encoded_descriptors, bits = self._encoded[arg], params[self._descriptor_params[arg]]
            if len(encoded_descriptors) >= MAX_DESCRIPTORS:
                encoded_descriptors.clear()
                self._buffers[arg].clear()
            self._buffers[arg].append((ctypes.c_char * len(bits)).from_buffer_copy(bits))
            encoded_descriptors[address] = ctypes.addressof(self._buffers[arg][-1])

    def encoded_descriptors(self, arg: int) -> dict[int, int]:
        """Where the descriptors of an argument are in the host's memory, by the address of the tensor."""
        return self._encoded[arg]

    def _capture(self, args: Sequence[Any]) -> CapturedLaunch:
        return self._driver.capture(lambda stream: self._run(*args, stream=stream), self._device)

    def _find_params(self, markers: Sequence[Any]) -> dict[int, int]:
        """Which parameter each argument is, of those that are one: each is looked for by a value of its own."""
        params = self._capture(markers).params
        found: dict[int, int] = {}
        for arg, value in enumerate(markers):
            if type(value) not in (int, float):
                continue
            param = [n for n, one in enumerate(params) if len(one) <= 8 and one == _to_bytes(value, len(one))]
            # A whole number that is not there is compiled in; one of floating point never is.
            if len(param) > 1 or (type(value) is float and not param):
                raise DriverError(f"argument {arg} is found {len(param)} times among the parameters")
            found.update((arg, n) for n in param)
        return found

    def _pack(self, args: Sequence[Any]) -> list[bytes]:
        params = list(self._captured_launch.params)
        for arg, param in self._param_of_arg.items():
            params[param] = _to_bytes(args[arg], len(params[param]))
        return params

    @staticmethod
    def _without_tensor(value: Any) -> Any:
        """An argument that keeps no memory of anybody alive."""
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        return with_address(value, value.base.data_ptr()) if is_descriptor(value) else value

    @staticmethod
    def _marker(arg: int, value: Any) -> Any:
        """A value that no other argument has: numbers of 31 bits, which fit addresses as well."""
        if type(value) is int:
            return 0x50000000 + ALIGNMENT * arg
        return 1024.5 + arg if type(value) is float else value


def _to_bytes(value: Any, size: int) -> bytes:
    """A number as a parameter of so many bytes; none of that size if it is floating point, and not 4 or 8."""
    if type(value) is float:
        return struct.pack(f"<{FLOAT_FORMATS[size]}", value) if size in FLOAT_FORMATS else b""
    return int(value).to_bytes(8, "little", signed=value < 0)[:size]
