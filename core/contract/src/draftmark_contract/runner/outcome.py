"""Outcomes of items, and their counts. The six counts are separate and are never added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..failing_batch import Drawing


class Outcome(StrEnum):
    """Possible outcomes of an item. Only FAILED fails the run directly."""

    PASSED = "passed"
    """Judged, and correct."""
    REFUSED = "refused"
    """The backend refuses the geometry, with reasons that are equal everywhere."""
    DECLARED = "declared"
    """Failed as an entry of the plugin's `contract.toml` declares."""
    UNJUDGED = "unjudged"
    """Nothing wrong was found, but part of the result was not checked: see `BackendUnderTest.unjudged`."""
    FAILED = "failed"
    UPCOMING = "upcoming"
    """Failed, but the item is newer than the contract that the plugin targets. Such items are counted separately."""


@dataclass(frozen=True)
class Result:
    """Holds the outcome of one item. `message` is complete enough for a bug report.

    `drawing` is the batch of a failed item as plain data (`failing_batch.drawing`), for a report; otherwise None.
    """

    item: str
    tier: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    marks: tuple[str, ...] = ()
    drawing: Drawing | None = None

    @property
    def ran(self) -> bool:
        """True if the item ran. An item without a mark is unjudged because it lacked something that it needs."""
        return self.outcome is not Outcome.REFUSED and (self.outcome is not Outcome.UNJUDGED or bool(self.marks))

    @property
    def rule(self) -> str:
        """Name of the contract's rule: the check's name without its tier suffix."""
        return self.check.removesuffix("_on_device")

    @property
    def check(self) -> str:
        """Name of the check."""
        return self.item.partition("[")[0]

    @property
    def case(self) -> str:
        """Id of the case."""
        return self.item.partition("[")[2].removesuffix("]")

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain types. Only a failed item with a batch has the key ``drawing``."""
        row = {**asdict(self), "outcome": self.outcome.value, "marks": list(self.marks)}
        return row if self.drawing else {name: value for name, value in row.items() if name != "drawing"}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Result:
        """Read a result that `as_json` returned."""
        return cls(**{**row, "outcome": Outcome(row["outcome"]), "marks": tuple(row["marks"])})


@dataclass(frozen=True)
class Counts:
    """Holds the six counts of a verdict: numbers of items by outcome."""

    passed: int = 0
    refused: int = 0
    declared: int = 0
    unjudged: int = 0
    failed: int = 0
    not_run: int = 0

    @classmethod
    def of(cls, results: Iterable[Result], items: int) -> Counts:
        """Count the results of a run. `items` is the number of items that the run's tiers have."""
        found = Counter(result.outcome.value for result in results)
        return cls(**found, not_run=items - found.total())

    def __str__(self) -> str:
        """Return five of the counts as text. The sixth, items that did not run, stands in the verdict line by tier."""
        names = ("passed", "refused", "declared", "unjudged", "failed")
        return ", ".join(f"{getattr(self, name):,} {name}" for name in names)
