"""Relaunch cache: the launches of a function are recorded once and repeated for other tensors of the same layout.

An eager forward of a model makes the same launches once a layer, and all of their numbers come from layouts and sizes.
So they are noted the first time, and a later call fills in the addresses: of parameters that the driver takes as they
are (`cuda_driver`), or, where the driver does not tell them, of Triton's own call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_uint64, sizeof
from functools import reduce
from operator import or_
from threading import Lock
from typing import Any, Protocol

import torch
from triton.runtime.driver import driver

from . import cuda_driver
from .cuda_driver import DriverError
from .launcher import ALIGNMENT, LaunchRecord, record_launches
from .parameters import LaunchTemplate, is_descriptor, with_address

MAX_LAYOUTS = 1024
"""Layouts that are remembered at a time, and addresses of each."""


class RecordedLaunch(Protocol):
    """One launch that was made, without the tensors that it was made for."""

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch it with tensors at other addresses."""


class RecordedLaunches:
    """The launches of one layout.

    Attributes:
        addresses: the addresses of the tensors for which they are made next.
    """

    def __init__(self, count: int) -> None:
        self.addresses = (c_uint64 * count)()
        self.launches: list[RecordedLaunch] = []

    def address_of(self, tensor: int) -> int:
        """Where a tensor's address is, in the host's memory."""
        return addressof(self.addresses) + tensor * sizeof(c_uint64)


class RelaunchCache:
    """A function's launches, by the layout of its tensors.

    Args:
        names: of the kernels' parameters for the tensors, in the order in which calls give them.
        aliases: of further parameters that are of one of those tensors too, and its name there.
        on_second_use: most layouts come once. Launches are remembered of those that come a second time, since that
            costs more than a launch does; of a model's layers, which are alike, all are.
    """

    def __init__(
        self, names: tuple[str, ...], aliases: Mapping[str, str] | None = None, on_second_use: bool = False
    ) -> None:
        self._tensor_index = {name: tensor for tensor, name in enumerate(names)}
        self._tensor_index |= {other: self._tensor_index[name] for other, name in (aliases or {}).items()}
        self._cache: dict[tuple[Any, ...], RecordedLaunches] = {}
        self._seen_once: set[tuple[Any, ...]] | None = set() if on_second_use else None
        self._templates: dict[tuple[Any, ...], LaunchTemplate | None] = {}
        self._lock = Lock()

    def __call__(
        self, layout: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], launch: Callable[..., None], *args: Any
    ) -> None:
        """Do as ``launch(*args, *tensors)`` does.

        Args:
            layout: all that its launches depend on, but for the device and what `tensors` say: sizes, strides, dtypes,
                which of them are None.
            tensors: those whose addresses change from call to call. The first is always there. Whatever else is
                launched with stays where it is.
        """
        first = tensors[0]
        assert first is not None
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        # Triton compiles apart for addresses that are multiples of 16.
        odd = reduce(or_, addresses) % ALIGNMENT
        alignment = tuple([address % ALIGNMENT == 0 for address in addresses]) if odd else None
        device = first.get_device()
        key = (layout, alignment, device)
        recorded = self._cache.get(key)
        if recorded is None:
            self._record(key, tensors, launch, args)
            return
        stream = driver.active.get_current_stream(device)
        with self._lock:
            recorded.addresses[:] = addresses  # type: ignore[assignment]  # whose elements may be words too
            for launch_again in recorded.launches:
                launch_again(addresses, stream)

    def _record(
        self,
        key: tuple[Any, ...],
        tensors: tuple[torch.Tensor | None, ...],
        launch: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        device, found = key[-1], cuda_driver.driver()
        if found is not None and found.is_capturing(driver.active.get_current_stream(device)):
            launch(*args, *tensors)  # in another one's capture nothing else is captured
            return
        if self._is_first_use(key):
            launch(*args, *tensors)
            return
        if len(self._cache) >= MAX_LAYOUTS:
            self._cache.clear()
            self._templates.clear()
        # A grid without programs is no launch to the driver.
        launched = [one for one in record_launches(launch, *args, *tensors) if all(one[1])]
        recorded = RecordedLaunches(len(tensors))
        recorded.launches += [self._make_launch(recorded, tensors, device, *one) for one in launched]
        self._cache[key] = recorded

    def _is_first_use(self, key: tuple[Any, ...]) -> bool:
        """Whether a layout was not met before, where most are met once."""
        if self._seen_once is None or key in self._seen_once:
            return False
        if len(self._seen_once) >= MAX_LAYOUTS:
            self._seen_once.clear()
        self._seen_once.add(key)
        return True

    def _make_launch(
        self,
        recorded: RecordedLaunches,
        tensors: Sequence[torch.Tensor | None],
        device: int,
        compiled: Any,
        grid: Any,
        args: tuple[Any, ...],
    ) -> RecordedLaunch:
        """A launch, and which of its arguments is the address or the descriptor of which tensor."""
        tensor_args: list[tuple[int, int]] = []
        for arg, (name, value) in enumerate(zip(compiled.src.fn.arg_names, args, strict=True)):
            tensor = self._tensor_index.get(name)
            if isinstance(value, torch.Tensor):
                if tensor is None or tensors[tensor] is None:
                    # Another one stands for a tensor that there is not.
                    tensor = next((i for i, one in enumerate(tensors) if one is value), None)
            elif not is_descriptor(value):
                continue
            if tensor is not None:
                tensor_args.append((arg, tensor))
        template = self._template(device, compiled, grid, args)
        if template is None:
            return TritonLaunch((compiled, grid, args), tensor_args)
        return DriverLaunch(template, (compiled, grid, args), tensor_args, recorded)

    def _template(self, device: int, compiled: Any, grid: Any, args: tuple[Any, ...]) -> LaunchTemplate | None:
        found = cuda_driver.driver()
        if found is None:
            return None
        key = (compiled, device, *[(tuple(one.shape), tuple(one.strides)) for one in args if is_descriptor(one)])
        if key not in self._templates:
            try:
                self._templates[key] = LaunchTemplate(found, compiled, grid, args, device)
            except DriverError:
                self._templates[key] = None
        return self._templates[key]


class TritonLaunch:
    """A launch by Triton's own call.

    Args:
        launched: what was launched. tensor_args: which argument is the address or the descriptor of which tensor.
    """

    def __init__(self, launched: LaunchRecord, tensor_args: list[tuple[int, int]]) -> None:
        compiled, grid, args = launched
        self._run, self._args = compiled[grid], list(args)
        for arg, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self._args[arg] = value.data_ptr()
            elif is_descriptor(value):
                self._args[arg] = with_address(value, value.base.data_ptr())
        self._tensor_args = [one for one in tensor_args if not is_descriptor(args[one[0]])]
        self._descriptors: list[tuple[int, int, dict[int, Any]]] = [
            (arg, tensor, {}) for arg, tensor in tensor_args if is_descriptor(args[arg])
        ]

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch it with tensors at other addresses."""
        call_args = self._args.copy()
        for arg, tensor in self._tensor_args:
            call_args[arg] = addresses[tensor]
        for arg, tensor, cache in self._descriptors:
            address = addresses[tensor]
            if address not in cache:
                if len(cache) >= MAX_LAYOUTS:
                    cache.clear()
                cache[address] = with_address(call_args[arg], address)
            call_args[arg] = cache[address]
        self._run(*call_args, stream=stream)


class DriverLaunch:
    """A launch by CUDA's driver.

    Args:
        template: of its kernel. launched, tensor_args: as of `TritonLaunch`. recorded: whose words it takes.
    """

    def __init__(
        self,
        template: LaunchTemplate,
        launched: LaunchRecord,
        tensor_args: list[tuple[int, int]],
        recorded: RecordedLaunches,
    ) -> None:
        _, grid, args = launched
        self._template, self._launch = template, template.launch(grid, args)
        self._pointers, self._config = self._launch.pointers, self._launch.config
        self._launch_ex, self._call_args = self._launch.launch_ex, self._launch.call_args
        self._descriptor_args = [one for one in tensor_args if is_descriptor(args[one[0]])]
        for arg, tensor in tensor_args:
            if not is_descriptor(args[arg]):
                self._pointers[template.param_index(arg)] = recorded.address_of(tensor)
        self._descriptors = [
            (template.param_index(arg), tensor, template.encoded_descriptors(arg))
            for arg, tensor in self._descriptor_args
        ]

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch it with tensors at other addresses, which are in the words by now.

        Raises:
            DriverError: the driver refused.
        """
        pointers = self._pointers
        try:
            for param_index, tensor, cache in self._descriptors:
                pointers[param_index] = cache[addresses[tensor]]
        except KeyError:
            self._template.encode_descriptors({arg: addresses[tensor] for arg, tensor in self._descriptor_args})
            self(addresses, stream)
            return
        self._config.stream = stream
        code = self._launch_ex(*self._call_args)
        if code:
            raise DriverError(f"cuLaunchKernelEx: CUresult {code}")
