"""Relaunch cache: records the launches of a function once and repeats them for tensors of equal layout.

An eager forward makes the same launches in every layer, and the integer arguments depend only on layouts and sizes. So
launches are recorded once, and later calls only fill in addresses. Later calls launch through the CUDA driver
(`cuda_driver`), or through Triton's launcher if the driver does not report the parameters.
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

from draftmark import BackendError

from ..switches import LAUNCH, launch_mode, logger, uses_own_launch
from . import cuda_driver
from .cuda_driver import DriverError
from .launcher import ALIGNMENT, LAUNCHER, LaunchRecord
from .parameters import LaunchTemplate, is_descriptor, with_address

MAX_LAYOUTS = 1024
"""Maximum recorded layouts of a cache, and maximum cached descriptors of a launch argument."""
ALIGNED = frozenset(
    {
        *("q", "out", "k", "v", "k_source", "v_source", "k_cache", "v_cache"),
        *("x", "weight", "state", "conv", "keys", "updates", "decays", "channels", "totals", "matrices", "log_decay"),
    }
)
"""Kernel parameters for which Triton compiles a separate kernel if their address is not a multiple of 16."""


def drop_oldest(cache: dict[Any, Any], most: int) -> None:
    """Remove the oldest entry of a cache that holds `most` entries, so that one more fits."""
    if len(cache) >= most:
        del cache[next(iter(cache))]


class RecordedLaunch(Protocol):
    """One recorded kernel launch, without references to its tensors."""

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch the kernel with tensors at other addresses."""


class RecordedLaunches:
    """Holds the recorded launches of one layout.

    Attributes:
        addresses: uint64 ``[count]`` in host memory, tensor addresses of the next relaunch.
        launches: the launches, in order.
    """

    def __init__(self, count: int) -> None:
        self.addresses = (c_uint64 * count)()
        self.launches: list[RecordedLaunch] = []

    def address_of(self, tensor: int) -> int:
        """Return the host address of the word that holds a tensor's address."""
        return addressof(self.addresses) + tensor * sizeof(c_uint64)


class RelaunchCache:
    """Records and repeats the launches of a function, by the layout of its tensors.

    Args:
        names: kernel parameter of each tensor, in the order in which calls pass the tensors.
        aliases: further kernel parameters, each with the name in `names` of the same tensor.
        unrecorded_uses: uses of a layout before it is recorded. Most metadata layouts occur a few times only, and
            recording costs more than a launch. Layers share a layout, so their launches are recorded in the first use.
    """

    def __init__(
        self, names: tuple[str, ...], aliases: Mapping[str, str] | None = None, unrecorded_uses: int = 0
    ) -> None:
        self._tensor_index = {name: tensor for tensor, name in enumerate(names)}
        self._tensor_index |= {other: self._tensor_index[name] for other, name in (aliases or {}).items()}
        self._aligned = [tensor for tensor, name in enumerate(names) if name in ALIGNED]
        self._cache: dict[tuple[Any, ...], RecordedLaunches] = {}
        self._unrecorded_uses, self._uses = unrecorded_uses, dict[tuple[Any, ...], int]()
        # Templates stay: there is one for each compiled kernel and cache shape, and a new one takes several captures.
        self._templates: dict[tuple[Any, ...], LaunchTemplate | None] = {}
        self._lock = Lock()

    def __call__(
        self, layout: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], launch: Callable[..., None], *args: Any
    ) -> None:
        """Launch with the effect of ``launch(*args, *tensors)``.

        Args:
            layout: key of everything that the launches depend on, except the device and the tensors' addresses: sizes,
                strides, dtypes, and which tensors are None.
            tensors: tensors with addresses that change from call to call; the first is never None. All other tensors
                of the launches must stay at their addresses.
        """
        first = tensors[0]
        assert first is not None
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        # Triton compiles separate kernels for addresses of ALIGNED that are not multiples of 16, so their alignment is
        # part of the key.
        odd = reduce(or_, addresses) % ALIGNMENT
        alignment = tuple([addresses[n] % ALIGNMENT == 0 for n in self._aligned]) if odd else None
        alignment = None if alignment is None or all(alignment) else alignment
        device = first.get_device()
        if device >= 0 and device != driver.active.get_current_device():
            with torch.cuda.device(device):
                self(layout, tensors, launch, *args)
            return
        cuda_driver.bind_context(device)
        key = (layout, alignment, device)
        recorded = self._cache.get(key)
        if recorded is None:
            self._record(key, tensors, launch, args)
            return
        stream = driver.active.get_current_stream(device)
        with self._lock:
            recorded.addresses[:] = addresses  # type: ignore[assignment]  # the array also accepts int
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
        is_capturing = found is not None and found.is_capturing(driver.active.get_current_stream(device))
        # During graph capture nothing is recorded: recording is itself a capture, and captures cannot nest.
        if is_capturing or not uses_own_launch() or self._is_rare(key):
            launch(*args, *tensors)
            return
        drop_oldest(self._cache, MAX_LAYOUTS)
        # Launches with a grid extent of 0 are dropped, because they launch nothing.
        launched = [one for one in LAUNCHER.record(launch, *args, *tensors) if all(one[1])]
        recorded = RecordedLaunches(len(tensors))
        recorded.launches += [self._make_launch(recorded, tensors, device, *one) for one in launched]
        self._cache[key] = recorded

    def _is_rare(self, key: tuple[Any, ...]) -> bool:
        """Count a use of a layout, and check whether recording it waits for more uses."""
        used = self._uses.pop(key, 0)
        if used >= self._unrecorded_uses:
            return False
        drop_oldest(self._uses, MAX_LAYOUTS)
        self._uses[key] = used + 1
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
        """Return a recorded launch, after matching address and descriptor arguments to tensors."""
        tensor_args: list[tuple[int, int]] = []
        for arg, (name, value) in enumerate(zip(compiled.src.fn.arg_names, args, strict=True)):
            tensor = self._tensor_index.get(name)
            if isinstance(value, torch.Tensor):
                if tensor is None or tensors[tensor] is None:
                    # If the parameter's own tensor is None, the launch passes another tensor as a placeholder
                    # (`operands.or_placeholder`). Find that one.
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
        key = (compiled, device, *[(tuple(one.shape), tuple(one.strides)) for one in args if is_descriptor(one)])
        if key not in self._templates:
            self._templates[key] = make_template(compiled, grid, args, device)
        return self._templates[key]


def make_template(compiled: Any, grid: Any, args: tuple[Any, ...], device: int) -> LaunchTemplate | None:
    """Return a template that repeats one launch of a compiled kernel; None if the driver cannot repeat it.

    Raises:
        BackendError, DriverError: the driver cannot repeat it, and `LAUNCH` is set to ``driver``.
    """
    found, must = cuda_driver.driver(), launch_mode() == "driver"
    if found is None:
        if must:
            raise BackendError(f"{LAUNCH} is driver, but there is no libcuda.so.1; unset it for Triton's launcher")
        return None
    try:
        return LaunchTemplate(found, compiled, grid, args, device)
    except DriverError as error:
        if must:
            raise
        logger.warning(
            "kernel %s is launched through Triton's launcher, which takes 10 to 20 µs longer: %s",
            compiled.src.fn.__name__,
            error,
        )
        return None


class TritonLaunch:
    """A recorded launch that is repeated through Triton's launcher.

    Args:
        launched: the recorded launch.
        tensor_args: (argument index, tensor index) of each argument that is an address or a descriptor.
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
        """Launch the kernel with tensors at other addresses."""
        call_args = self._args.copy()
        for arg, tensor in self._tensor_args:
            call_args[arg] = addresses[tensor]
        for arg, tensor, cache in self._descriptors:
            address = addresses[tensor]
            if address not in cache:
                drop_oldest(cache, MAX_LAYOUTS)
                cache[address] = with_address(call_args[arg], address)
            call_args[arg] = cache[address]
        self._run(*call_args, stream=stream)


class DriverLaunch:
    """A recorded launch that is repeated through the CUDA driver.

    Args:
        template: launch template of the kernel.
        launched, tensor_args: see `TritonLaunch`.
        recorded: launches of the layout; its address words are the launch parameters.
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
        """Launch the kernel with tensors at other addresses, which the caller has stored in `recorded.addresses`.

        Raises:
            DriverError: the driver rejected the launch.
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
