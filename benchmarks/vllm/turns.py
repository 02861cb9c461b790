"""Correction of measured speeds for slow-downs that hit every engine of a case in the same turn.

In a turn all engines run on one core (`cores`), one after another. Cores differ by more than backends do. Without the
correction, the median turn of one engine may be on a fast core and that of another on a slow core.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any


def levelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a run with speeds corrected for slow-downs that hit all engines in the same turn.

    The pace of a turn is the median over the engines of a case of this quotient: an engine's speed in the turn, divided
    by its median speed. `all` keeps the measured speeds, `median_tokens_per_s` is the uncorrected median. A case in
    which some engine lacks a turn is not corrected.
    """
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[case_of(row)].append(row)
    paces = {case: _paces(beside) for case, beside in cases.items()}
    return [_level(row, paces[case_of(row)]) for row in rows]


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of rows that are compared: phase, drafter, case, GPUs and KV dtype, but not the page size."""
    return row["phase"], row.get("drafter"), row["case"], row["num_gpus"], row.get("kv_dtype")


def _paces(beside: list[dict[str, Any]]) -> list[float]:
    """Return the pace (relative speed of the host) of each turn; empty if engines have different numbers of turns."""
    shares = [_by_turn([speed / median(row["all"]) for speed in row["all"]], row) for row in beside]
    if len({len(one) for one in shares}) > 1:
        return []
    return [median([share for one in turn for share in one]) for turn in zip(*shares, strict=True)]


def _by_turn(said: list[float], row: dict[str, Any]) -> list[list[float]]:
    """Return one list per turn, with the values of all processes of an engine in that turn."""
    processes = row.get("processes", 1)
    return [said[first : first + processes] for first in range(0, len(said), processes)]


def _level(row: dict[str, Any], paces: list[float]) -> dict[str, Any]:
    if not paces:
        return row
    turns = zip(_by_turn(row["all"], row), paces, strict=True)
    speed = median([one / pace for turn, pace in turns for one in turn])
    step = {"step_ms": round(row["step_ms"] * row["tokens_per_s"] / speed, 3)} if "step_ms" in row else {}
    return {**row, "tokens_per_s": round(speed, 1), "median_tokens_per_s": row["tokens_per_s"], **step}
