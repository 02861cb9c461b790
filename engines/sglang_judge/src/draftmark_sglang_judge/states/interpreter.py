"""Fits Triton's interpreter to kernels of SGLang that a GPU compiles and the interpreter refuses or misreads."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np


@cache
def fit_interpreter() -> None:
    """Patch the interpreter once a process.

    * A mask may be numbers: a comparison of Python numbers makes them.
    * `tl.dot` reads bfloat16 as numbers. The interpreter holds bfloat16 as bits.
    * An autotuned kernel runs with its first configuration, untimed.
    """
    import torch
    import triton.language as tl
    from triton.runtime import autotuner, interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def of_bools(mask: Any) -> Any:
        if not isinstance(mask, handle) or mask.data.dtype == np.bool_:
            return mask
        return handle(mask.data.astype(np.bool_), tl.int1)

    def of_floats(matrix: Any) -> Any:
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        bits = np.ascontiguousarray(matrix.data).view(np.uint16).astype(np.uint32) << 16
        return handle(bits.view(np.float32), tl.float32)

    def masked_load(self: Any, ptrs: Any, mask: Any, *more: Any, **named: Any) -> Any:
        return load(self, ptrs, of_bools(mask), *more, **named)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        return store(self, ptrs, value, of_bools(mask), *more, **named)

    def product(self: Any, a: Any, b: Any, *more: Any, **named: Any) -> Any:
        return dot(self, of_floats(a), of_floats(b), *more, **named)

    def first_choice(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.fn.run(*arguments, **named, **self.configs[0].all_kwargs())

    builder.create_masked_load, builder.create_masked_store, builder.create_dot = masked_load, masked_store, product
    autotuner.Autotuner.run = first_choice
    torch.cpu.device = lambda index: nullcontext()  # type: ignore[attr-defined]


def bind_late(package: str) -> None:
    """Let kernels of a package that imported a function of `triton.language` by name use the interpreter's own."""
    import triton.language as tl

    names = {id(getattr(tl, name)): name for name in ("exp", "exp2", "log", "log2", "gather")}
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for held, value in list(vars(module).items()):
                if id(value) in names:
                    setattr(module, held, partial(_late, tl, names[id(value)]))
                elif getattr(value, "__name__", "") == "triton.language.extra.libdevice":
                    setattr(module, held, SimpleNamespace(**{one: partial(_late, tl, one) for one in names.values()}))


def _late(language: Any, name: str, *arguments: Any, **named: Any) -> Any:
    return getattr(language, name)(*arguments, **named)
