"""Longest waits of a pass: when requests that had begun got no tokens, and what the server ran meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MOST = 8
"""Largest number of waits that a record keeps of one pass."""
SHORTEST_S = 0.05
"""Shortest wait that counts."""
TOGETHER_S = 0.02
"""Waits that end within this time of each other end with one step of the engine."""


def stalls(
    answers: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]], compiled: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the longest waits between two chunks of an answer, longest first.

    Args:
        answers: answers of a client (see `client`).
        timed: steps of the server's scheduler (see `hook.sitecustomize.time_steps`), from `with_seconds`.
        compiled: compilations of the server, with ``at`` and ``ms``.

    Returns:
        ``at_s`` and ``ms``: begin and length. ``requests``: number of requests that waited. ``compiled_ms``:
        compilations meanwhile. ``steps``: number, rows and seconds of the steps that ended meanwhile, by their mode.
    """
    waits = sorted(
        (late + one["zero_unix_s"], early + one["zero_unix_s"])
        for one in answers
        for (early, _), (late, _) in pairwise(one["chunks"])
        if late - early >= SHORTEST_S
    )
    groups: list[list[tuple[float, float]]] = []
    for wait in waits:
        if groups and wait[0] - groups[-1][-1][0] <= TOGETHER_S:
            groups[-1].append(wait)
        else:
            groups.append([wait])
    found = [_stall(group, answers[0]["zero_unix_s"], timed, compiled) for group in groups]
    return sorted(found, key=lambda one: -one["ms"])[:MOST]


def with_seconds(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each step its ``seconds``: from its launch, or the end of the step before if that is later, to its end."""
    found, before = [], 0.0
    for step in steps:
        found.append({**step, "seconds": step["ended"] - max(step["began"], before)})
        before = step["ended"]
    return found


def by_mode(timed: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the number, rows and seconds of steps by their mode."""
    found: dict[str, list[float]] = {}
    for step in timed:
        sums = found.setdefault(step["mode"], [0, 0, 0.0])
        sums[:] = sums[0] + 1, sums[1] + step["rows"], round(sums[2] + step["seconds"], 4)
    return found


def _stall(
    waits: Sequence[tuple[float, float]],
    zero: float,
    timed: Sequence[dict[str, Any]],
    compiled: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    end, begin = max(late for late, _ in waits), min(early for _, early in waits)
    return {
        "at_s": round(begin - zero, 3),
        "ms": round(1000 * max(late - early for late, early in waits), 1),
        "requests": len(waits),
        "compiled_ms": round(sum(one["ms"] for one in compiled if begin <= one["at"] <= end), 1),
        "steps": by_mode([step for step in timed if begin < step["ended"] <= end]),
    }
