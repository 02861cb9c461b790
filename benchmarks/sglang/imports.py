"""Imports SGLang with all modules that a server loads at its start."""

from __future__ import annotations

import sys
import types
from importlib import import_module

UNUSED = ("dsa_backend", "deepseek_v4_backend", "flashmla_backend")
"""Attention backends of models that are not measured. EAGLE workers import them when they capture graphs on CUDA."""


def import_sglang(rehearsed: bool) -> None:
    """Import the modules that take long. On CUDA, replace unused attention backends that cannot be imported."""
    import_module("sglang.srt.managers.scheduler")
    import_module("sglang.srt.speculative.eagle_worker_v2")
    if rehearsed:
        return
    for name in UNUSED:
        module = f"sglang.srt.layers.attention.{name}"
        try:
            import_module(module)
        except Exception:  # a module with a missing dependency can raise any error at import
            stand_in = types.ModuleType(module)
            stand_in.__getattr__ = _unused  # type: ignore[method-assign]
            sys.modules[module] = stand_in


def _unused(name: str) -> type:
    """Return an empty class for any name. Names such as `__file__` raise AttributeError, as Python expects."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
