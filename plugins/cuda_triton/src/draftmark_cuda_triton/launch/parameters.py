"""Launch template of a compiled kernel: which driver parameter holds each kernel argument."""

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
"""Maximum cached TMA descriptors of a kernel argument, by tensor address."""
LEAST_ADDRESS = 2**32
"""Integers above this are addresses: a launch has no size, stride or count as large."""
FLOAT_FORMATS = {4: "f", 8: "d"}
"""`struct` format of a floating-point parameter, by its size in bytes."""


@dataclass(frozen=True)
class TensorAddress:
    """Replaces the tensor in a cached descriptor by its address, so that the cache keeps no tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the tensor's address."""
        return self.address


def is_descriptor(value: Any) -> bool:
    """Check whether an argument is a TMA descriptor."""
    return hasattr(value, "block_shape")


def with_address(descriptor: Any, address: int) -> Any:
    """Return a copy of a descriptor for a tensor of equal layout at another address."""
    found = copy(descriptor)
    found.base = TensorAddress(address, descriptor.base.dtype)
    return found


class LaunchTemplate:
    """Packs the driver parameters of any launch of one compiled kernel.

    Arguments that are not parameters were compiled in and are equal in every launch of the kernel.

    Args:
        compiled: Triton's compiled kernel.
        grid, args: grid and arguments of one launch of it.

    Raises:
        DriverError: the driver does not report the launch, or an argument is not found among its parameters.
    """

    def __init__(self, driver: Driver, compiled: Any, grid: Sequence[int], args: Sequence[Any], device: int) -> None:
        self._driver, self._device = driver, device
        self._run = compiled[tuple(grid)]
        self._dependent = bool(compiled.metadata.launch_pdl)
        metadata = compiled.metadata
        if any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
            raise DriverError("the kernel uses scratch memory, which Triton allocates anew for every launch")
        values = [self._without_tensor(one) for one in args]
        self._args = values
        self._captured_launch = captured = self._capture(values)
        self._grid_factor = captured.grid[0] // grid[0]
        self._param_of_arg = self._find_params([self._marker(arg, one) for arg, one in enumerate(values)])
        self._descriptor_params = self._find_descriptor_params(values)
        self._encoded: dict[int, dict[int, int]] = {arg: {} for arg in self._descriptor_params}
        self._buffers: dict[int, dict[int, Any]] = {arg: {} for arg in self._descriptor_params}
        if self._pack(values) != list(captured.params):
            raise DriverError("the located arguments do not reproduce the captured parameters")

    def launch(self, grid: Sequence[int], args: Sequence[Any]) -> PreparedLaunch:
        """Return a prepared launch with this grid and these arguments."""
        params = self._pack([self._without_tensor(one) for one in args])
        return PreparedLaunch(
            self._driver, self._captured_launch, (grid[0] * self._grid_factor, *grid[1:]), params, self._dependent
        )

    def param_index(self, arg: int) -> int:
        """Return the index of the parameter that holds an address or descriptor argument."""
        return self._descriptor_params[arg] if arg in self._descriptor_params else self._param_of_arg[arg]

    def encode_descriptors(self, addresses: dict[int, int]) -> None:
        """Encode the descriptor arguments for tensors at other addresses, and store them for `encoded_descriptors`.

        A descriptor that is already stored stays where it is. Of MAX_DESCRIPTORS of an argument the oldest leaves.

        Args:
            addresses: tensor address of each descriptor argument, by argument index.
        """
        args = [with_address(one, addresses[n]) if n in addresses else one for n, one in enumerate(self._args)]
        params = self._capture(args).params
        for arg, address in addresses.items():
            encoded, buffers, bits = self._encoded[arg], self._buffers[arg], params[self._descriptor_params[arg]]
            if address in encoded:
                continue
            if len(encoded) >= MAX_DESCRIPTORS:
                oldest = next(iter(encoded))
                del encoded[oldest], buffers[oldest]
            buffers[address] = (ctypes.c_char * len(bits)).from_buffer_copy(bits)
            encoded[address] = ctypes.addressof(buffers[address])

    def encoded_descriptors(self, arg: int) -> dict[int, int]:
        """Return the host addresses of an argument's encoded descriptors, by the address of the tensor."""
        return self._encoded[arg]

    def _capture(self, args: Sequence[Any]) -> CapturedLaunch:
        return self._driver.capture(lambda stream: self._run(*args, stream=stream), self._device)

    def _find_params(self, markers: Sequence[Any]) -> dict[int, int]:
        """Return each argument's driver parameter index, found by capturing a launch with unique values."""
        params = self._capture(markers).params
        found: dict[int, int] = {}
        for arg, value in enumerate(markers):
            if type(value) not in (int, float):
                continue
            param = [n for n, one in enumerate(params) if len(one) <= 8 and one == _to_bytes(value, len(one))]
            # An integer without a parameter was compiled in as a constant. Floats are never compiled in, so a missing
            # one is an error.
            if len(param) > 1 or (type(value) is float and not param):
                raise DriverError(f"argument {arg} matches {len(param)} parameters instead of one")
            found.update((arg, n) for n in param)
        return found

    def _find_descriptor_params(self, values: Sequence[Any]) -> dict[int, int]:
        """Return each descriptor argument's driver parameter index, found by moving one descriptor at a time.

        The first captured launch shows the descriptors at their own addresses. A further capture for each descriptor
        moves only that one. It must change exactly one parameter of more than 8 bytes.
        """
        longer = [n for n, one in enumerate(self._captured_launch.params) if len(one) > 8]
        # The address of another tensor of the launch: nothing is read there, and TMA accepts it, because it is aligned.
        addresses = [one for one in values if type(one) is int and one > LEAST_ADDRESS and one % ALIGNMENT == 0]
        if not addresses:
            raise DriverError("no tensor of the launch has an address that a descriptor can take")
        address = addresses[0]
        found: dict[int, int] = {}
        for arg, value in enumerate(values):
            if not is_descriptor(value):
                continue
            moved = [with_address(one, address) if n == arg else one for n, one in enumerate(values)]
            params = self._capture(moved).params
            changed = [n for n in longer if params[n] != self._captured_launch.params[n]]
            if len(changed) != 1:
                raise DriverError(f"argument {arg}, a descriptor, changes {len(changed)} parameters instead of one")
            found[arg] = changed[0]
        if sorted(found.values()) != longer:
            raise DriverError(f"{len(found)} descriptors, but {len(longer)} parameters above 8 bytes")
        return found

    def _pack(self, args: Sequence[Any]) -> list[bytes]:
        params = list(self._captured_launch.params)
        for arg, param in self._param_of_arg.items():
            params[param] = _to_bytes(args[arg], len(params[param]))
        return params

    @staticmethod
    def _without_tensor(value: Any) -> Any:
        """Replace a tensor by its address, so that the argument keeps no memory alive."""
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        return with_address(value, value.base.data_ptr()) if is_descriptor(value) else value

    @staticmethod
    def _marker(arg: int, value: Any) -> Any:
        """Return a value that is unique among the arguments. Integers have 31 bits, so they also serve as addresses."""
        if type(value) is int:
            return 0x50000000 + ALIGNMENT * arg
        return 1024.5 + arg if type(value) is float else value


def _to_bytes(value: Any, size: int) -> bytes:
    """Return a number as `size` little-endian bytes; empty for a float if the size is not 4 or 8."""
    if type(value) is float:
        return struct.pack(f"<{FLOAT_FORMATS[size]}", value) if size in FLOAT_FORMATS else b""
    return int(value).to_bytes(8, "little", signed=value < 0)[:size]
