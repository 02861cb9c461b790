"""The kernels twice: compiled for a GPU, and interpreted for CPU tensors, in one process.

Triton decides when a kernel is defined where it runs. So the package `kernels` is imported once as it is, and once
more under another name with TRITON_INTERPRET=1, when the first CPU tensor asks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

VARIABLE = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Kernels:
    """One flavour of every kernel that `launch` starts."""

    write_uniform: Any
    write_chunks: Any
    write_context: Any
    write_rows: Any
    move_rows: Any
    write_scale: Any


def kernels_for(tensor: torch.Tensor) -> Kernels:
    """The kernels that run where `tensor` is."""
    return _load(not tensor.is_cuda)


@cache
def _load(interpreted: bool) -> Kernels:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if interpreted else "0"
    try:
        package = _package(interpreted)
        uniform, ragged, kv_write, rows = (
            importlib.import_module(f"{package}.{name}") for name in ("uniform", "ragged", "kv_write", "rows")
        )
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    return Kernels(
        uniform.write_uniform,
        ragged.write_chunks,
        ragged.write_context,
        kv_write.write_rows,
        rows.move_rows,
        rows.write_scale,
    )


def _package(interpreted: bool) -> str:
    name = f"{__package__}.kernels"
    if not interpreted:
        return name
    origin = importlib.util.find_spec(name)
    assert origin is not None and origin.origin is not None
    alias = f"{__package__}.interpreted_kernels"
    spec = importlib.util.spec_from_file_location(
        alias, origin.origin, submodule_search_locations=list(origin.submodule_search_locations or [])
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)
    return alias
