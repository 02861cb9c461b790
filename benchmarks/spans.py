"""Spans of time, as a profile has them."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Its start and its end, in one unit."""


def covered(spans: Iterable[Span]) -> float:
    """How long at least one of these spans lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
