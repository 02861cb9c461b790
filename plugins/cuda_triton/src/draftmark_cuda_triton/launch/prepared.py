"""Launches of one kernel through the CUDA driver, with different integers and addresses in each call.

`relaunch` repeats a launch only with the same integers. Sizes change in every step with a prompt, so `relaunch` would
record a launch in each of them. Here each call writes all arguments into the parameters of one prepared launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass
from functools import partial
from struct import Struct
from threading import Lock
from typing import Any

from triton.runtime.driver import driver

from ..switches import logger, uses_own_launch
from . import cuda_driver
from .cuda_driver import DriverError, PreparedLaunch
from .launcher import LAUNCHER, launch_kernel
from .parameters import LaunchTemplate
from .relaunch import make_template


@dataclass(frozen=True)
class Parameters:
    """Holds a kernel's prepared launch on one device.

    Attributes:
        device: index of the device.
        launch: the launch; its parameter n is a word of `words`.
        words: the arguments as 64-bit words, in host memory. A 32-bit parameter is the lower half of its word.
        write_words: ``write_words(words, 0, *values)`` writes all arguments. Addresses fit signed 64-bit words.
    """

    device: int
    launch: PreparedLaunch
    words: Any
    write_words: Callable[..., None]


class PreparedKernel:
    """Launches one kernel on one device: a call through Triton's launcher, and `again` through the CUDA driver.

    Arguments are tensors of that device and integers. The kernel must not be specialized on their values or alignments,
    so that Triton compiles it once. The constants of all calls must be equal.
    """

    def __init__(self) -> None:
        self._parameters: Parameters | None = None
        self._is_refused = False
        self._lock = Lock()

    def __call__(self, kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
        """Launch `kernel`, and prepare later launches. Arguments as in `Launcher.launch`."""
        is_tried = self._is_refused or self._parameters is not None
        if is_tried or not self._prepare(kernel, grid, args, constants):
            launch_kernel(kernel, grid, *args, **constants)

    def again(self, grid: tuple[int], args: Sequence[Any]) -> bool:
        """Launch the kernel of the first call with these arguments; return False, without a launch, if not prepared.

        Args:
            args: tensors, and integers that fit 32 bits.
        """
        found, active = self._parameters, driver.active
        if found is None or not grid[0] or LAUNCHER.is_observed() or active.get_current_device() != found.device:
            return False
        cuda_driver.bind_context(found.device)
        launch, values = found.launch, [one if type(one) is int else one.data_ptr() for one in args]
        with self._lock:
            found.write_words(found.words, 0, *values)
            launch.grid[0], launch.config.stream = grid[0], active.get_current_stream(found.device)
            code = launch.launch_ex(*launch.call_args)
        if code:
            raise DriverError(f"cuLaunchKernelEx: CUresult {code}")
        return True

    def _prepare(self, kernel: Any, grid: tuple[int], args: tuple[Any, ...], constants: dict[str, Any]) -> bool:
        """Launch, and prepare later launches on the current device; return False if that is impossible now."""
        device, current = args[0].get_device(), driver.active.get_current_device()
        if not uses_own_launch() or LAUNCHER.is_observed() or (device >= 0 and device != current):
            return False
        cuda_driver.bind_context(current)
        found = cuda_driver.driver()
        # A template takes captures of its own, and captures cannot nest.
        if found is not None and found.is_capturing(driver.active.get_current_stream(current)):
            return False
        ((compiled, full_grid, every),) = LAUNCHER.record(partial(launch_kernel, kernel, grid, *args, **constants))
        template = make_template(compiled, full_grid, every, current)
        self._parameters = None if template is None else _parameters(template, full_grid, every, len(args), current)
        self._is_refused = self._parameters is None
        return True


def _parameters(
    template: LaunchTemplate, grid: tuple[int, ...], args: tuple[Any, ...], count: int, device: int
) -> Parameters | None:
    """Return a launch that reads the first `count` arguments as words; None if one of these was compiled in."""
    launch, form = template.launch(grid, args), Struct(f"{count}q")
    words = create_string_buffer(form.size)
    try:
        for arg in range(count):
            launch.pointers[template.param_index(arg)] = addressof(words) + arg * (form.size // count)
    except KeyError as error:
        logger.warning("a kernel is launched through Triton's launcher: argument %s was compiled in", error)
        return None
    return Parameters(device, launch, words, form.pack_into)
