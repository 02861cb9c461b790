"""Launch of a Triton kernel without Triton's argument binding.

Triton's own call binds and describes every argument anew, and each of ours has forty. A graph's replay does not pay
that; an eager forward of few rows waits for it, once a launch and layer. What Triton compiles for can be read off the
arguments, so a launch that is like an earlier one in all of that starts the same compiled kernel at once
(`launch_kernel`). Where a caller can say what all of a launch's numbers come from, they are not worked out again either
(`relaunch`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ALIGNMENT = 16
"""Addresses and integers that are multiples of it are compiled for apart."""
INT32_LIMIT = 2**31

_CompiledLaunch = tuple[JITFunction[Any], Any, tuple[Any, ...]]
_COMPILED: dict[tuple[Any, ...], _CompiledLaunch] = {}
_SPECIALIZED: dict[int, tuple[bool, ...]] = {}
LaunchRecord = tuple[Any, tuple[int, ...], tuple[Any, ...]]
"""A compiled kernel, its grid of three, all of its arguments."""
_RECORDING: ContextVar[list[LaunchRecord] | None] = ContextVar("draftmark_noted_launches", default=None)


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` as ``kernel[grid](*args, **constants)`` does.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`; of Triton's interpreter, it is called as it is.
        args: its first arguments, none of them a constant: tensors, descriptors, numbers, None.
        constants: all others, and the compiler's options.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*args, **constants)
        return
    specialized = _SPECIALIZED.get(id(kernel)) or _specialized(kernel)
    specializations = [_specialization(value, specialize) for value, specialize in zip(args, specialized, strict=False)]
    key = (id(kernel), driver.active.get_current_device(), *specializations, *constants.items())
    found = _COMPILED.get(key)
    full_grid = (*grid, 1, 1)[:3]
    if found is None:
        compiled = kernel[grid](*args, **constants)
        trailing_constants = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _COMPILED[key] = kernel, compiled, trailing_constants
    else:
        _, compiled, trailing_constants = found
        compiled[full_grid](*args, *trailing_constants)
    recording = _RECORDING.get()
    if recording is not None:
        recording.append((compiled, full_grid, (*args, *trailing_constants)))


def supports_pdl() -> bool:
    """Whether a grid of the current device can take its place while the one before it runs: sm_90 and newer."""
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def pdl_option(pdl: bool) -> dict[str, bool]:
    """The compiler's option of a grid that waits, itself, for the one before it."""
    return {"launch_pdl": True} if pdl else {}


def record_launches(launch: Callable[..., None], *args: Any) -> list[LaunchRecord]:
    """What ``launch(*args)`` starts, which it does."""
    found: list[LaunchRecord] = []
    token = _RECORDING.set(found)
    try:
        launch(*args)
    finally:
        _RECORDING.reset(token)
    return found


def _specialized(kernel: JITFunction[Any]) -> tuple[bool, ...]:
    """Of each parameter, whether Triton compiles for what kind of integer it is."""
    return _SPECIALIZED.setdefault(id(kernel), tuple(not one.do_not_specialize for one in kernel.params))


def _specialization(value: Any, specialized: bool) -> Any:
    """All that Triton may compile for of an argument."""
    kind = type(value)
    if kind is int:
        is_int32 = -INT32_LIMIT <= value < INT32_LIMIT
        return (is_int32, value == 1, value % ALIGNMENT == 0) if specialized else is_int32
    if value is None or kind is float:
        return kind
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    # A descriptor: how it is copied is in its box, its dtype and, of Gluon's, its layout in shared memory.
    return value.base.dtype, *value.block_shape, getattr(value, "layout", None)
