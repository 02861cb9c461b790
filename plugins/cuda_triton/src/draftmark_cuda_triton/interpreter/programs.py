"""A package's kernels as the interpreter runs them: their programs one after the other, on CPU tensors where they lie.

Triton's own launch looks through the whole language, and through the arguments' storages, every time. Here the
interpreted language is put together once, of `Operations`, and set while a kernel runs. What is taken
from the interpreter is private to Triton: where such a name has gone, its own launch is kept.
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
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

REQUIRED_NAMES = (
    *("GridExecutor", "InterpretedFunction", "InterpreterBuilder", "TensorHandle", "interpreter_builder"),
    *("_LangPatchScope", "_convert_float", "_implicit_cvt", "_interpreter", "_patch_lang"),
)
"""Names of the interpreter that are used here and by `operations`; all private, whatever they begin with."""


def use_fast_launch(kernels: ModuleType) -> None:
    """Let `InterpretedKernel` launch the interpreted kernels of one module."""
    if not all(hasattr(interpreter, name) for name in REQUIRED_NAMES):
        return
    for name, value in list(vars(kernels).items()):
        if type(value) is interpreter.InterpretedFunction:
            setattr(kernels, name, InterpretedKernel(value))


class InterpretedKernel:
    """One interpreted kernel, launched as Triton's are: ``kernel[grid](*arguments)``."""

    def __init__(self, kernel: Any) -> None:
        self._function: FunctionType = kernel.rewrite()
        self._signature = inspect.signature(self._function)
        self._constants = frozenset(interpreter.GridExecutor(self._function, kernel.arg_names, ()).constexprs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Run the programs of `grid`; arguments that are the compiler's alone (num_warps) are left out."""
        known = {name: value for name, value in kwargs.items() if name in self._signature.parameters}
        bound = self._signature.bind(*args, **known).arguments
        convert, builder = interpreter._implicit_cvt, interpreter.interpreter_builder
        values = {name: one if name in self._constants else convert(one) for name, one in bound.items()}
        sizes = (*grid, 1, 1)[:3]
        # As on a GPU: log2 of a row's sum to which no key has added is -inf, exp2 of a sink far above all keys inf.
        with _language(self._function), numpy.errstate(divide="ignore", over="ignore"):
            builder.set_grid_dim(*sizes)
            for program in product(*map(range, sizes)):
                builder.set_grid_idx(*program)
                try:
                    self._function(**values)
                except Exception as error:
                    raise InterpreterError(repr(error)) from error


@contextmanager
def _language(function: FunctionType) -> Iterator[None]:
    """The language as it is interpreted, and afterwards as it was, for a GPU's kernels."""
    scope: Any = interpreter._LangPatchScope()
    try:
        for owner, name, value in _language_patches(function.__globals__["tl"]):
            scope.set_attr(owner, name, value)
        yield
    finally:
        scope.restore()


@cache
def _language_patches(language: ModuleType) -> tuple[tuple[Any, str, Any], ...]:
    """What the interpreter sets in the language: owner, name, value; the language's functions as `Operations`."""
    # Imported where the names it needs are known to be there.
    from .operations import Operations

    operations = Operations()
    scope: Any = interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": language}))
    try:
        return tuple(
            (owner, name, _patched(operations, name, original, getattr(owner, name)))
            for owner, name, original in scope._changes
        )
    finally:
        scope.restore()


def _patched(operations: Any, name: str, original: Any, interpreted: Any) -> Any:
    """What stands for the interpreter's `interpreted_config` while our kernels run."""
    from .reductions import numpy_reduce

    if core.is_builtin(original):
        return operations.cached(original)
    return numpy_reduce(interpreted) if name == "reduce" else interpreted
