"""Launch of a Triton kernel without Triton's argument binding.

In each launch Triton binds and inspects every argument, and our kernels have about forty. CUDA graph replay avoids that
cost; an eager forward pays for it in every launch of every layer. The arguments determine Triton's specialization. So
`launch_kernel` finds the kernel that an earlier launch with equal specialization compiled, and launches it directly.
`relaunch` also avoids computing the arguments again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ..compiled.loading import finish_loading, use_store
from ..compiled.source import libdevice_path
from ..switches import uses_own_launch
from .cuda_driver import bind_context

ALIGNMENT = 16
"""Triton compiles separate kernels for addresses and integers that are multiples of 16."""
INT32_LIMIT = 2**31

CompiledLaunch = tuple[JITFunction[Any], Any, tuple[Any, ...]]
"""A kernel, its compiled specialization, and the constants that its launches pass after the arguments."""
LaunchRecord = tuple[Any, tuple[int, ...], tuple[Any, ...]]
"""A recorded launch: compiled kernel, grid of three, all arguments."""
KernelCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A call of `launch_kernel` without its grid: kernel, arguments, constants and compiler options."""
COMPILER_OPTIONS = {"enable_fp_fusion": True, "extern_libs": (("libdevice", libdevice_path()),)}
"""Compiler options of every kernel. Triton 3.10 no longer fuses multiplications and additions by default. torch
can replace Triton's libdevice in a process that it compiles in, but a kernel must be equal in every process."""


class Launcher:
    """Launches kernels, and remembers the compiled kernel of each specialization.

    Attributes:
        compiled: compiled kernels by the key of their calls (`key`).
    """

    def __init__(self) -> None:
        self.compiled: dict[tuple[Any, ...], CompiledLaunch] = {}
        self._specialized: dict[int, tuple[bool, ...]] = {}
        self._recording: ContextVar[list[LaunchRecord] | None] = ContextVar("draftmark_recorded_launches", default=None)
        self._collecting: ContextVar[Callable[[KernelCall], object] | None] = ContextVar(
            "draftmark_collected_calls", default=None
        )

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch `kernel` with the effect of ``kernel[grid](*args, **constants)``.

        Args:
            kernel: a function of `triton.jit` or `gluon.jit`. An interpreted kernel is called directly.
            args: the kernel's first arguments, none of them a constant: tensors, descriptors, numbers, None. The first
                is a tensor, and the kernel runs on its device.
            constants: the remaining arguments, and the compiler options.
        """
        if not isinstance(kernel, JITFunction):
            kernel[grid](*args, **constants)
            return
        constants |= COMPILER_OPTIONS
        collect = self._collecting.get()
        if collect is not None:
            collect((kernel, args, constants))
            return
        current, device = driver.active.get_current_device(), args[0].get_device()
        if device >= 0 and device != current:
            with torch.cuda.device(device):
                self.launch(kernel, grid, *args, **constants)
            return
        bind_context(current)
        if not uses_own_launch():
            use_store(kernel, current)
            kernel[grid](*args, **constants)
            return
        key = self.key(kernel, current, args, constants)
        found = self.compiled.get(key)
        if found is None:
            found = self._load_or_compile(key, kernel, args, constants)
            for error in finish_loading([found[1]]):
                raise error
        full_grid = (*grid, 1, 1)[:3]
        _, compiled, trailing_constants = found
        compiled[full_grid](*args, *trailing_constants)
        recording = self._recording.get()
        if recording is not None:
            recording.append((compiled, full_grid, (*args, *trailing_constants)))

    def is_observed(self) -> bool:
        """Check whether this context records or collects launches."""
        return self._recording.get() is not None or self._collecting.get() is not None

    def find_compiled(self, kernel: JITFunction[Any], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Return Triton's compiled kernel of a call, which later launches use; it may not be loaded yet.

        Args:
            kernel, args, constants: a `KernelCall`.
        """
        key = self.key(kernel, driver.active.get_current_device(), args, constants)
        return (self.compiled.get(key) or self._load_or_compile(key, kernel, args, constants))[1]

    def key(
        self, kernel: JITFunction[Any], device: int, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the key of the compiled kernel that a call launches on a device."""
        specialized = self._specialized.get(id(kernel)) or self._specialized_parameters(kernel)
        specializations = [_specialization(*one) for one in zip(args, specialized, strict=False)]
        return (id(kernel), device, *specializations, *constants.items())

    def _load_or_compile(
        self, key: tuple[Any, ...], kernel: JITFunction[Any], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> CompiledLaunch:
        """Load a kernel from the store, or compile it."""
        use_store(kernel, driver.active.get_current_device())
        compiled = kernel.warmup(*args, grid=(1,), **constants)
        trailing_constants = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        found = self.compiled[key] = kernel, compiled, trailing_constants
        return found

    def _specialized_parameters(self, kernel: JITFunction[Any]) -> tuple[bool, ...]:
        """Return whether the kernel is compiled for each parameter's value (integers) or alignment (addresses)."""
        return self._specialized.setdefault(
            id(kernel),
            tuple(not (one.do_not_specialize or one.do_not_specialize_on_alignment) for one in kernel.params),
        )

    def record(self, launch: Callable[..., None], *args: Any) -> list[LaunchRecord]:
        """Call ``launch(*args)`` and return the launches that it made."""
        found: list[LaunchRecord] = []
        token = self._recording.set(found)
        try:
            launch(*args)
        finally:
            self._recording.reset(token)
        return found

    @contextmanager
    def collect(self, collect: Callable[[KernelCall], object]) -> Iterator[None]:
        """Pass each call of `launch` inside the context to `collect`, instead of launching a kernel."""
        token = self._collecting.set(collect)
        try:
            yield
        finally:
            self._collecting.reset(token)


LAUNCHER = Launcher()
"""The process's launcher. All backends share its compiled kernels, as they share Triton's functions."""
launch_kernel = LAUNCHER.launch


def supports_pdl() -> bool:
    """Check whether the current device supports programmatic dependent launch: sm_90 and newer."""
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def pdl_option(pdl: bool) -> dict[str, bool]:
    """Return the compiler option of a programmatic dependent launch; the kernel must wait for the previous grid."""
    return {"launch_pdl": True} if pdl else {}


def _specialization(value: Any, specialized: bool) -> Any:
    """Return the properties of an argument for which Triton can compile a separate kernel (its specialization)."""
    kind = type(value)
    if kind is int:
        is_int32 = -INT32_LIMIT <= value < INT32_LIMIT
        return (is_int32, value == 1, value % ALIGNMENT == 0) if specialized else is_int32
    if value is None or kind is float:
        return kind
    if isinstance(value, torch.Tensor):
        return value.dtype, specialized and value.data_ptr() % ALIGNMENT == 0
    # For a descriptor, its box, its dtype and (in Gluon) its shared-memory layout decide how TMA copies.
    return value.base.dtype, *value.block_shape, getattr(value, "layout", None)
