"""Launches of one kernel through the CUDA driver, with different integers and addresses in each call.

`relaunch` repeats a launch only with the same integers. Sizes change in every step with a prompt, so `relaunch` would
record a launch in each of them. Here each call writes all arguments into the parameters of one prepared launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_uint64, sizeof
from dataclasses import dataclass
from functools import partial
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
        launch: the launch; its parameter n is a word of `words`.
        words: uint64 ``[arguments]``, in host memory. A 32-bit parameter is the lower half of its word.
    """

    launch: PreparedLaunch
    words: Any


class PreparedKernel:
    """Launches one kernel: a call through Triton's launcher, and `again` through the CUDA driver.

    Arguments are tensors and integers. The kernel must not be specialized on their values or alignments, so that Triton
    compiles it once. The constants of all calls must be equal.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, Parameters | None] = {}
        self._lock = Lock()

    def __call__(self, kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
        """Launch `kernel`, and prepare later launches. Arguments as in `Launcher.launch`."""
        device, current = args[0].get_device(), driver.active.get_current_device()
        if device in self._parameters or not self._prepare(device, current, kernel, grid, args, constants):
            launch_kernel(kernel, grid, *args, **constants)

    def again(self, grid: tuple[int], args: Sequence[Any]) -> bool:
        """Launch the kernel of the first call with these arguments; return False, without a launch, if not prepared.

        Args:
            args: tensors, and integers that fit 32 bits.
        """
        device, current = args[0].get_device(), driver.active.get_current_device()
        found = self._parameters.get(device)
        if found is None or not grid[0] or LAUNCHER.is_observed() or (device >= 0 and device != current):
            return False
        cuda_driver.bind_context(current)
        launch = found.launch
        values = [one if type(one) is int else one.data_ptr() for one in args]
        with self._lock:
            found.words[:] = values
            launch.config.grid[0], launch.config.stream = grid[0], driver.active.get_current_stream(current)
            code = launch.launch_ex(*launch.call_args)
        if code:
            raise DriverError(f"cuLaunchKernelEx: CUresult {code}")
        return True

    def _prepare(
        self, device: int, current: int, kernel: Any, grid: tuple[int], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> bool:
        """Launch, and prepare later launches on the current device; return False if that is impossible now."""
        cuda_driver.bind_context(current)
        found = cuda_driver.driver()
        # A template takes captures of its own, and captures cannot nest.
        is_capturing = found is not None and found.is_capturing(driver.active.get_current_stream(current))
        if is_capturing or not uses_own_launch() or LAUNCHER.is_observed() or (device >= 0 and device != current):
            return False
        ((compiled, full_grid, every),) = LAUNCHER.record(partial(launch_kernel, kernel, grid, *args, **constants))
        template = make_template(compiled, full_grid, every, current)
        self._parameters[device] = None if template is None else _parameters(template, full_grid, every, len(args))
        return True


def _parameters(
    template: LaunchTemplate, grid: tuple[int, ...], args: tuple[Any, ...], count: int
) -> Parameters | None:
    """Return a launch that reads the first `count` arguments as words; None if one of these was compiled in."""
    launch, words = template.launch(grid, args), (c_uint64 * count)()
    try:
        for arg in range(count):
            launch.pointers[template.param_index(arg)] = addressof(words) + arg * sizeof(c_uint64)
    except KeyError as error:
        logger.warning("a kernel is launched through Triton's launcher: argument %s was compiled in", error)
        return None
    return Parameters(launch, words)
