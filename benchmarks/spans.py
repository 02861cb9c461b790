"""Time spans of a profile."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Start and end, in one unit."""


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of these spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
