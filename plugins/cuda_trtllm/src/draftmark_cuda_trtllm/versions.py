"""Which FlashInfer this is tested with. Read from installed metadata; the library itself is not imported."""

from __future__ import annotations

import importlib.metadata
from functools import cache

DISTRIBUTION = "flashinfer-python"
# The version that cuda_flashinfer needs (flashinfer#4267), so that one environment serves both; its XQA, the Python and
# the kernels, is that of 0.6.18.post1 byte for byte.
TESTED = ("0.7.2",)
"""Versions that the plugin is for."""
MASKED_FP8_SINCE = (0, 6, 16)
"""Before, XQA took a causal tail for every fp8 cache with few rows, whatever the mask (flashinfer#4199)."""


@cache
def installed() -> str | None:
    """The installed version, or None. Sizing works without the library."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.6.18.post1" → (0, 6, 18)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
