"""A package of kernels twice in one process: compiled for a GPU, and interpreted for CPU tensors.

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
from functools import cache
from threading import RLock
from types import ModuleType

import torch

from .interpreter import speed_up_interpreter

VARIABLE = "TRITON_INTERPRET"
OWN = f"{__package__}.kernels"
ONE_AT_A_TIME = RLock()
"""Held while a package is imported: what says how kernels run is the process's own."""


def compiled_or_interpreted(tensor: torch.Tensor, package: str = OWN) -> ModuleType:
    """The package of kernels that run where `tensor` is; each of its modules is an attribute.

    Args:
        package: its full name. Its modules import each other relatively, so that both copies find their own.
    """
    return _load(package, not tensor.is_cuda)


@cache
def _load(package: str, interpreted: bool) -> ModuleType:
    """The package's one copy of a kind: who asks while another thread imports it waits, and is given the same."""
    with ONE_AT_A_TIME:
        return _imported(package, interpreted)


@cache
def _imported(package: str, interpreted: bool) -> ModuleType:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if interpreted else "0"
    try:
        found = _second(package) if interpreted else importlib.import_module(package)
        names = [f"{found.__name__}.{one.name}" for one in pkgutil.iter_modules(found.__path__)]
        modules = [importlib.import_module(name) for name in names]
        if interpreted:
            from .programs import run_lightly

            for module in modules:
                run_lightly(module)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    return found


def _second(package: str) -> ModuleType:
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
