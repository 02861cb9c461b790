"""FlashInfer releases that this plugin accepts. Reads installed metadata and never imports the library."""

from __future__ import annotations

import importlib.metadata
from functools import cache

DISTRIBUTION = "flashinfer-python"
ACCEPTED = ("0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.4")
"""Accepted releases, oldest first. `tests/test_drift.py` reads each one's sources. PyPI has no 0.7.3.

cuda_flashinfer accepts the same ones, so one environment serves both plugins. XQA's kernels are equal in these
releases, except how 0.7.4 converts fp8 to bfloat16: two elements at a time, with the same results.
"""
RANGE = f">={ACCEPTED[0]},<={ACCEPTED[-1]}"
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
