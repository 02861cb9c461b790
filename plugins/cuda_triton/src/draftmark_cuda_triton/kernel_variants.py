"""Compiled kernels for GPU tensors and interpreted kernels for CPU tensors, in one process.

Triton reads TRITON_INTERPRET when a kernel is defined. So a kernel package is imported normally for GPU tensors. For
the first CPU tensor it is imported again, with TRITON_INTERPRET=1 and under another module name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any

import torch

INTERPRET_VARIABLE = "TRITON_INTERPRET"
INTERPRETER = "draftmark_triton_interpreter"
"""Package that speeds up interpreted kernels. Where it is not installed, Triton's own interpreter serves, slower."""
KERNELS = f"{__package__}.kernels"
IMPORT_LOCK = RLock()
"""Lock held during imports of kernel packages, because TRITON_INTERPRET is set for the whole process meanwhile."""


@contextlib.contextmanager
def _interpret(interpreted: bool) -> Iterator[None]:
    """Set TRITON_INTERPRET while kernels are defined, since `triton.jit` reads it then."""
    before = os.environ.get(INTERPRET_VARIABLE)
    os.environ[INTERPRET_VARIABLE] = "1" if interpreted else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERPRET_VARIABLE]
        else:
            os.environ[INTERPRET_VARIABLE] = before


with IMPORT_LOCK, _interpret(False):
    from . import kernels

__all__ = ["compiled_or_interpreted", "kernels", "select_variant"]


def runs_compiled(tensor: torch.Tensor) -> bool:
    """Check whether compiled kernels process a tensor; tests replace this to compile without a GPU."""
    return tensor.is_cuda


def select_variant(kernel: Any, tensor: torch.Tensor) -> Any:
    """Return `kernel` (of the package `kernels`) for a GPU tensor, or its interpreted copy for a CPU tensor."""
    if runs_compiled(tensor):
        return kernel
    module = kernel.__module__.rpartition(".")[2]
    return getattr(getattr(load_variant(KERNELS, True), module), kernel.__name__)


def compiled_or_interpreted(tensor: torch.Tensor, package: str = KERNELS) -> ModuleType:
    """Return the kernel package for the device of `tensor`: compiled for a GPU, interpreted for the CPU.

    Args:
        package: full module name. Its modules must import each other relatively, so that each copy imports its own.

    Returns:
        The package, with each of its modules as an attribute.
    """
    return load_variant(package, not tensor.is_cuda)


def _interpreter() -> ModuleType | None:
    return importlib.import_module(INTERPRETER) if importlib.util.find_spec(INTERPRETER) else None


@cache
def load_variant(package: str, interpreted: bool) -> ModuleType:
    """Return the package's compiled or interpreted variant. Concurrent callers wait and receive the same module."""
    with IMPORT_LOCK:
        return _import_variant(package, interpreted)


@cache
def _import_variant(package: str, interpreted: bool) -> ModuleType:
    with _interpret(interpreted):
        found = _import_interpreted_copy(package) if interpreted else importlib.import_module(package)
        # Modules are imported by name, because the `__init__` of a sibling plugin's package possibly does not import
        # them.
        names = [f"{found.__name__}.{one.name}" for one in pkgutil.iter_modules(found.__path__)]
        modules = [importlib.import_module(name) for name in names]
        if interpreted and (faster := _interpreter()) is not None:
            for module in modules:
                faster.speed_up(module)
    return found


def _import_interpreted_copy(package: str) -> ModuleType:
    """Import the package again, as `interpreted_<name>`, with interpreted kernels."""
    # Gluon must be imported before the interpreter: Gluon copies the language's math functions, and the interpreter
    # replaces them permanently.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon.language")
    if (faster := _interpreter()) is not None:
        faster.prepare()
    origin = importlib.util.find_spec(package)
    assert origin is not None and origin.origin is not None
    parent, _, leaf = package.rpartition(".")
    alias = f"{parent}.interpreted_{leaf}"
    spec = importlib.util.spec_from_file_location(
        alias, origin.origin, submodule_search_locations=list(origin.submodule_search_locations or [])
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module
