"""Collects facts about the processor that decide which kernels a library runs on it."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
DECISIVE = (
    *("sse4_2", "avx", "avx2", "avx512", "avx_", "amx", "fma", "f16c"),
    *("asimd", "neon", "sve", "smef", "smei", "smeb", "bf16", "i8mm", "fphp"),
)
"""Beginnings of the names of instruction sets on which numerical libraries dispatch, on x86 and on Arm."""


def processor() -> dict[str, str]:
    """Return name and instruction sets of the processor: ``{"name": …, "instructions": "amx_bf16 avx2 …"}``.

    Linux lists the instruction sets. Other systems give only the name.
    """
    rows = _cpuinfo()
    name = rows.get("model name") or rows.get("CPU part") or platform.processor() or platform.machine()
    flags = (rows.get("flags") or rows.get("Features") or "").split()
    return {"name": name, "instructions": " ".join(sorted(one for one in flags if one.startswith(DECISIVE)))}


def _cpuinfo() -> dict[str, str]:
    """Return the values of the first processor in /proc/cpuinfo."""
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    rows = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}
