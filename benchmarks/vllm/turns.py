"""What a turn did to all engines, taken out of what each of them said.

In a turn engines stand on one core (`cores`), one after another, and cores differ by more than backends do. So the
median turn of one engine may be one of a fast core, and that of another one of a slow.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any


def levelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a run, each case's as if all its turns had had the same pace; `all` stays as it was measured, and
    `median_tokens_per_s` is what the median turn of it was.

    A turn's pace is the median, over the engines of a case, of their speed in that turn beside their usual one. Where
    some engine has lost a turn, the case is left as it is.
    """
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[case_of(row)].append(row)
    paces = {case: _paces(beside) for case, beside in cases.items()}
    return [_level(row, paces[case_of(row)]) for row in rows]


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What engines are asked beside each other, whatever their pages; over KV of one dtype."""
    return row["phase"], row.get("drafter"), row["case"], row["num_gpus"], row.get("kv_dtype")


def _paces(beside: list[dict[str, Any]]) -> list[float]:
    """Of each turn of a case; none if engines have other numbers of turns."""
    shares = [_by_turn([speed / median(row["all"]) for speed in row["all"]], row) for row in beside]
    if len({len(one) for one in shares}) > 1:
        return []
    return [median([share for one in turn for share in one]) for turn in zip(*shares, strict=True)]


def _by_turn(said: list[float], row: dict[str, Any]) -> list[list[float]]:
    """What the processes of an engine said, turn after turn."""
    processes = row.get("processes", 1)
    return [said[first : first + processes] for first in range(0, len(said), processes)]


def _level(row: dict[str, Any], paces: list[float]) -> dict[str, Any]:
    if not paces:
        return row
    turns = zip(_by_turn(row["all"], row), paces, strict=True)
    speed = median([one / pace for turn, pace in turns for one in turn])
    step = {"step_ms": round(row["step_ms"] * row["tokens_per_s"] / speed, 3)} if "step_ms" in row else {}
    return {**row, "tokens_per_s": round(speed, 1), "median_tokens_per_s": row["tokens_per_s"], **step}
