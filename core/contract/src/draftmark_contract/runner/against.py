"""Comparison of a verdict with an earlier one of the same target: items that became better or worse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftmark_tools.cli.errors import ArgumentError

from .outcome import Outcome
from .record import SCHEMA
from .verdict import Verdict

SHOWN = 20
"""Number of items of each kind that are printed."""
ABSENT = "not run"
"""Outcome of an item that a verdict does not have."""
OLD_SCHEMA = 1
"""Schema of the verdicts that `draftmark judge` wrote before it shared the suite's words."""
OLD_WORDS = {"right": "passed", "wrong": "failed", "not served": "refused", "not asked": "unjudged"}


@dataclass(frozen=True)
class Earlier:
    """An earlier verdict.

    Attributes:
        path: its file.
        about: engine or contract, and day.
        outcomes: outcome of each item.
        tiers: tier of each item; "" in old verdicts.
    """

    path: str
    about: str
    outcomes: Mapping[str, str]
    tiers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Items with another outcome than in an earlier verdict, as (before, after), and items that failed in both.

    Attributes:
        worse: items that fail now and did not, and items that had passed and no longer run.
        better: items that had failed and do not now, and items that pass now and could not run.
    """

    earlier: Earlier
    worse: Mapping[str, tuple[str, str]]
    better: Mapping[str, tuple[str, str]]
    still_failing: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain types, for the verdict's JSON."""
        kinds = {"worse": self.worse, "better": self.better}
        found: dict[str, Any] = {
            kind: [{"item": item, "before": one[0], "after": one[1]} for item, one in items.items()]
            for kind, items in kinds.items()
        }
        return {"about": self.earlier.about, **found, "still_failing": list(self.still_failing)}

    def lines(self) -> list[str]:
        """Return the lines to print."""
        counts = (
            f"{len(self.worse):,} items worse, {len(self.better):,} better, {len(self.still_failing):,} still failing"
        )
        found = [f"compared with {self.earlier.path} ({self.earlier.about}): {counts}"]
        for kind, items in (("worse", self.worse), ("better", self.better)):
            found += [f"  {kind}: {item}: {one[0]} → {one[1]}" for item, one in list(items.items())[:SHOWN]]
            if len(items) > SHOWN:
                found.append(f"  {kind}: {len(items) - SHOWN:,} more items; --json FILE writes all of them")
        return found


def read(path: str, target: str) -> Earlier:
    """Read an earlier verdict of a target.

    Raises:
        ArgumentError: the file is no full verdict on this backend.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        outcomes = {row["item"]: OLD_WORDS.get(row["outcome"], str(row["outcome"])) for row in found["results"]}
        tiers = {row["item"]: row.get("tier", "") for row in found["results"]}
        schema, old = found["schema"], found["schema"] == OLD_SCHEMA
        before, runs = found["target" if old else "backend"], [found["machine"]] if old else found["runs"]
        day = runs[-1].get("date", "?") if runs else "?"
        engine = found.get("facts", {}).get("engine") or f"contract {found['contract']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"--against {path} is no verdict with every item ({type(error).__name__}: {error}); "
            "name a file that --json wrote"
        ) from error
    if schema not in (OLD_SCHEMA, SCHEMA):
        raise ArgumentError(f"--against {path} has schema {schema}, but this command reads {SCHEMA}; judge again")
    if before != target:
        raise ArgumentError(f"--against {path} judges {before}, not {target}; name a verdict of {target}")
    return Earlier(path, f"{engine}, {day}", outcomes, tiers)


def compare(verdict: Verdict, earlier: Earlier) -> Comparison:
    """Compare a verdict with an earlier one, except for items that were not selected, and tiers that did not run."""
    now = {one.item: one.outcome.value for one in verdict.results}
    ran = ("", *verdict.tiers_run) if verdict.complete else ()
    before_too = [item for item in earlier.outcomes if earlier.tiers.get(item, "") in ran]
    items = list(dict.fromkeys((*before_too, *now)))
    failed, passed = Outcome.FAILED.value, Outcome.PASSED.value
    worse, better, still = {}, {}, []
    for item in items:
        before, after = earlier.outcomes.get(item, ABSENT), now.get(item, ABSENT)
        if before == after == failed:
            still.append(item)
        elif after == failed or (before == passed and after != passed):
            worse[item] = before, after
        elif (before == failed and after != ABSENT) or (after == passed and before not in (passed, ABSENT)):
            better[item] = before, after
    return Comparison(earlier, worse, better, tuple(still))
