"""SGLang, imported with everything that a server loads when it starts."""

from __future__ import annotations

import sys
import types
from importlib import import_module

UNUSED = ("dsa_backend", "deepseek_v4_backend", "flashmla_backend")
"""Attention of models that are not measured, imported whenever an EAGLE worker captures its graphs on CUDA."""


def import_sglang(rehearsed: bool) -> None:
    """Import what takes a server's time; on CUDA, with stand-ins for what no measured model asks for."""
    import_module("sglang.srt.managers.scheduler")
    import_module("sglang.srt.speculative.eagle_worker_v2")
    if rehearsed:
        return
    for name in UNUSED:
        module = f"sglang.srt.layers.attention.{name}"
        try:
            import_module(module)
        except Exception:  # whatever it lacks
            stand_in = types.ModuleType(module)
            stand_in.__getattr__ = _unused  # type: ignore[method-assign]
            sys.modules[module] = stand_in


def _unused(name: str) -> type:
    """A class of any name; but of what Python asks every module for, such as `__file__`, there is nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
