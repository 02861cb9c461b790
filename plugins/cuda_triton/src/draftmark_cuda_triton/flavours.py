"""The kernels twice: compiled for a GPU, and interpreted for CPU tensors, in one process.

Triton decides when a kernel is defined where it runs. So the package `kernels` is imported once as it is, and once
more under another name with TRITON_INTERPRET=1, when the first CPU tensor asks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from typing import Any

import torch

VARIABLE = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Kernels:
    """One flavour of every kernel that `launch` and `tree_ops` start."""

    write_uniform: Any
    write_ragged: Any
    write_rows: Any
    attend_uniform: Any
    attend_ragged: Any
    merge_pieces: Any
    write_tail: Any
    walk: Any
    compact: Any


def kernels_for(tensor: torch.Tensor) -> Kernels:
    """The kernels that run where `tensor` is."""
    return _load(not tensor.is_cuda)


@cache
def _load(interpreted: bool) -> Kernels:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if interpreted else "0"
    try:
        package = _package(interpreted)
        schedule, kv_write, uniform, extend, merge, tail, walk, compact = (
            importlib.import_module(f"{package}.{name}")
            for name in ("schedule", "kv_write", "uniform", "extend", "merge", "tail", "walk", "compact")
        )
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    return Kernels(
        schedule.write_uniform,
        schedule.write_ragged,
        kv_write.write_rows,
        uniform.attend_uniform,
        extend.attend_ragged,
        merge.merge_pieces,
        tail.write_tail,
        walk.walk,
        compact.compact,
    )


def _package(interpreted: bool) -> str:
    name = f"{__package__}.kernels"
    if not interpreted:
        return name
    _skip_idle_checks()
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


def _skip_idle_checks() -> None:
    """Without debug mode the interpreter computes an overflow check of each integer operation and drops the result.

    Leaving it out halves the time of a kernel. The option is no public setting: where it has moved, nothing is skipped.
    """
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if is_dataclass(options) and getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = replace(options, sanitize_overflow=False)
