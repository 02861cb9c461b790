"""FlashInfer versions that this plugin is tested with. Reads installed metadata and never imports the library."""

from __future__ import annotations

import importlib.metadata
from functools import cache

DISTRIBUTION = "flashinfer-python"
# cuda_flashinfer needs this version (flashinfer#4267), so one environment serves both plugins. Its XQA, in Python and
# CUDA, equals the XQA of 0.6.18.post1 byte for byte.
TESTED = ("0.7.2",)
"""Versions that the plugin accepts."""
MASKED_FP8_SINCE = (0, 6, 16)
"""First release in which XQA reads the mask of an fp8 cache; older ones use a causal tail (flashinfer#4199)."""


@cache
def installed() -> str | None:
    """Return the installed FlashInfer version, or None if it is absent, because sizing works without it."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "0.6.18.post1" → (0, 6, 18)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
