"""Compiled and interpreted variants of the kernels in one process: for GPU tensors, and for CPU tensors.

Triton decides when a kernel is defined where it runs. So the package is imported once as it is, and once more under
another name with TRITON_INTERPRET=1, when the first CPU tensor asks.
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

from .interpreter.patches import speed_up_interpreter

INTERPRET_VARIABLE = "TRITON_INTERPRET"
KERNELS = f"{__package__}.kernels"
IMPORT_LOCK = RLock()
"""Held while a package is imported: the environment variable belongs to the whole process."""


@contextlib.contextmanager
def _interpret(interpreted: bool) -> Iterator[None]:
    """Set TRITON_INTERPRET while kernels are defined: `triton.jit` reads it then."""
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


def select_variant(kernel: Any, tensor: torch.Tensor) -> Any:
    """Return `kernel`, one of `kernels`, for a GPU tensor, or its interpreted copy for a CPU tensor."""
    if tensor.is_cuda:
        return kernel
    module = kernel.__module__.rpartition(".")[2]
    return getattr(getattr(load_variant(KERNELS, True), module), kernel.__name__)


def compiled_or_interpreted(tensor: torch.Tensor, package: str = KERNELS) -> ModuleType:
    """The package of kernels that run where `tensor` is; each of its modules is an attribute.

    Args:
        package: its full name. Its modules import each other relatively, so that both copies find their own.
    """
    return load_variant(package, not tensor.is_cuda)


@cache
def load_variant(package: str, interpreted: bool) -> ModuleType:
    """The package's one copy of a kind: who asks while another thread imports it waits, and is given the same."""
    with IMPORT_LOCK:
        return _import_variant(package, interpreted)


@cache
def _import_variant(package: str, interpreted: bool) -> ModuleType:
    with _interpret(interpreted):
        found = _import_interpreted_copy(package) if interpreted else importlib.import_module(package)
        # By name: a sibling plugin's package need not import its own modules.
        names = [f"{found.__name__}.{one.name}" for one in pkgutil.iter_modules(found.__path__)]
        modules = [importlib.import_module(name) for name in names]
        if interpreted:
            from .interpreter.programs import use_fast_launch

            for module in modules:
                use_fast_launch(module)
    return found


def _import_interpreted_copy(package: str) -> ModuleType:
    """The package once more, under a name of its own."""
    # The interpreter replaces the language's mathematics for good, and Gluon takes it over when it is first imported.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon.language")
    speed_up_interpreter()
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
