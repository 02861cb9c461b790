"""Launch of interpreted kernels: programs run one after another, directly on CPU tensors.

In every launch Triton patches the complete language and inspects the arguments' storages. Here the patched language is
built once, from `Operations`, and active while a kernel runs. The names used from the interpreter are private to
Triton. If one no longer exists, Triton's own launch is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

REQUIRED_NAMES = (
    *("GridExecutor", "InterpretedFunction", "InterpreterBuilder", "TensorHandle", "interpreter_builder"),
    *("_convert_float", "_implicit_cvt", "_interpreter", "_patch_lang"),
)
"""Private names of the interpreter that this package needs."""


def use_fast_launch(kernels: ModuleType) -> None:
    """Replace the interpreted kernels of a module by `InterpretedKernel`."""
    if not all(hasattr(interpreter, name) for name in REQUIRED_NAMES):
        return
    for name, value in list(vars(kernels).items()):
        if type(value) is interpreter.InterpretedFunction:
            setattr(kernels, name, InterpretedKernel(value))


class InterpretedKernel:
    """An interpreted kernel with Triton's launch syntax: ``kernel[grid](*arguments)``."""

    def __init__(self, kernel: Any) -> None:
        self._function: FunctionType = kernel.rewrite()
        self._signature = inspect.signature(self._function)
        self._constants = frozenset(interpreter.GridExecutor(self._function, kernel.arg_names, ()).constexprs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Run every program of `grid`. Compiler options such as num_warps are ignored."""
        known = {name: value for name, value in kwargs.items() if name in self._signature.parameters}
        bound = self._signature.bind(*args, **known).arguments
        builder = interpreter.interpreter_builder
        values = {name: one if name in self._constants else _operand(one) for name, one in bound.items()}
        sizes = (*grid, 1, 1)[:3]
        # As on a GPU, log2(0) of a row that saw no key is -inf, and exp2 of a sink far above all logits is inf.
        with _language(self._function), numpy.errstate(divide="ignore", over="ignore"):
            builder.set_grid_dim(*sizes)
            for program in product(*map(range, sizes)):
                builder.set_grid_idx(*program)
                try:
                    self._function(**values)
                except Exception as error:
                    raise InterpreterError(repr(error)) from error


def _operand(value: Any) -> Any:
    """Return an argument as a tensor of the language. Triton derives the type once for each kind of argument."""
    kind = type(value)
    if kind is int and INT32.min <= value <= INT32.max:
        key, word = kind, value
    elif kind is torch.Tensor:
        key, word = value.dtype, value.data_ptr()
    else:
        return interpreter._implicit_cvt(value)
    if key not in _KINDS:
        made = interpreter._implicit_cvt(value)
        _KINDS[key] = {name: one for name, one in vars(made).items() if name != "handle"}, made.handle
    known, handle = _KINDS[key]
    result = object.__new__(core.tensor)
    result.__dict__ = {
        **known,
        "handle": interpreter.TensorHandle(numpy.array([word], handle.data.dtype), handle.dtype),
    }
    return result


ABSENT = object()
"""Original value of a name that only the interpreter adds."""
INT32 = numpy.iinfo(numpy.int32)
_KINDS: dict[Any, tuple[dict[str, Any], Any]] = {}
"""Attributes and handle of a converted argument, for small integers and for the tensors of each dtype."""


@contextmanager
def _language(function: FunctionType) -> Iterator[None]:
    """Patch the language for the interpreter, and restore it afterwards for compiled kernels."""
    patches = _language_patches(function.__globals__["tl"])
    try:
        for owner, name, value, _ in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, _, original in patches:
            if original is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@cache
def _language_patches(language: ModuleType) -> tuple[tuple[Any, str, Any, Any], ...]:
    """Return the interpreter's patches (owner, name, value, original value), with functions from `Operations`."""
    # Imported late: `operations` needs interpreter names that the caller has checked.
    from .operations import Operations

    operations = Operations()
    scope: Any = interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": language}))
    try:
        # A name that is patched twice keeps its last value.
        patched = {
            (owner, name): _patched(operations, owner, name, original) for owner, name, original in scope._changes
        }
    finally:
        scope.restore()
    return tuple((owner, name, value, getattr(owner, name, ABSENT)) for (owner, name), value in patched.items())


def _patched(operations: Any, owner: Any, name: str, original: Any) -> Any:
    """Return the replacement of a patched name: cached operation, NumPy's way, or the interpreter's own value."""
    from .boxes import copied_boxes
    from .reductions import numpy_reduce

    interpreted = getattr(owner, name)
    if core.is_builtin(original):
        found = operations.cached(original)
        return copied_boxes(found) if (owner, name) == (core.tensor_descriptor_base, "load") else found
    return numpy_reduce(interpreted) if name == "reduce" else interpreted
