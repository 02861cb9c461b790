"""Comparison of a verdict with an earlier one of the same target: items that became better or worse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmark.cli.errors import ArgumentError

from .item import Outcome
from .verdict import SCHEMA, Verdict

SHOWN = 20
"""Number of items of each kind that are printed."""
ABSENT = "not run"
"""Outcome of an item that a verdict does not have."""


@dataclass(frozen=True)
class Earlier:
    """An earlier verdict: its file, its facts, and the outcome of each item."""

    path: str
    about: str
    outcomes: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """Items with another outcome than in an earlier verdict, as (before, after), and items that are wrong in both.

    Attributes:
        worse: items that are wrong now and were not, and items that were right and no longer run.
        better: items that were wrong and are not now, and items that are right now and could not run.
    """

    earlier: Earlier
    worse: Mapping[str, tuple[str, str]]
    better: Mapping[str, tuple[str, str]]
    still_wrong: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain types, for the verdict's JSON."""
        kinds = {"worse": self.worse, "better": self.better}
        found: dict[str, Any] = {
            kind: [{"item": item, "before": one[0], "after": one[1]} for item, one in items.items()]
            for kind, items in kinds.items()
        }
        return {"about": self.earlier.about, **found, "still_wrong": list(self.still_wrong)}

    def lines(self) -> list[str]:
        """Return the lines to print."""
        counts = f"{len(self.worse):,} items worse, {len(self.better):,} better, {len(self.still_wrong):,} still wrong"
        found = [f"compared with {self.earlier.path} ({self.earlier.about}): {counts}"]
        for kind, items in (("worse", self.worse), ("better", self.better)):
            found += [f"  {kind}: {item}: {one[0]} → {one[1]}" for item, one in list(items.items())[:SHOWN]]
            if len(items) > SHOWN:
                found.append(f"  {kind}: {len(items) - SHOWN:,} more items; --json FILE writes all of them")
        return found


def read(path: str, target: str) -> Earlier:
    """Read an earlier verdict of a target.

    Raises:
        ArgumentError: the file is no verdict of `draftmark judge` on this target.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        outcomes = {row["item"]: str(row["outcome"]) for row in found["results"]}
        before, schema, facts, day = found["target"], found["schema"], found["facts"], found["machine"].get("date", "?")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"--against {path} is no verdict of `draftmark judge` ({type(error).__name__}: {error}); "
            "name a file that --json wrote"
        ) from error
    if schema != SCHEMA:
        raise ArgumentError(f"--against {path} has schema {schema}, but this command reads {SCHEMA}; judge again")
    if before != target:
        raise ArgumentError(f"--against {path} judges {before}, not {target}; name a verdict of {target}")
    return Earlier(path, f"{facts.get('engine', '?')}, {day}", outcomes)


def compare(verdict: Verdict, earlier: Earlier) -> Comparison:
    """Compare a verdict with an earlier one. After a run of selected items, only these items are compared."""
    now = {one.item: one.outcome.value for one in verdict.results}
    items = list(now) if verdict.selected else list({**earlier.outcomes, **now})
    wrong, right = Outcome.WRONG.value, Outcome.RIGHT.value
    worse, better, still = {}, {}, []
    for item in items:
        before, after = earlier.outcomes.get(item, ABSENT), now.get(item, ABSENT)
        if before == after == wrong:
            still.append(item)
        elif after == wrong or (before == right and after != right):
            worse[item] = before, after
        elif (before == wrong and after != ABSENT) or (after == right and before not in (right, ABSENT)):
            better[item] = before, after
    return Comparison(earlier, worse, better, tuple(still))
