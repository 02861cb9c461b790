"""How items end, and how many end so: six counts that are never added up under one word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How an item ended. FAILED alone fails the run at once."""

    PASSED = "passed"
    """Judged, and right."""
    REFUSED = "refused"
    """The geometry is refused, with reasons and alike everywhere."""
    DECLARED = "declared"
    """Failed as the plugin's `contract.toml` says it does."""
    UNJUDGED = "unjudged"
    """Nothing was found wrong, but something was not looked at: see `BackendUnderTest.unjudged`."""
    FAILED = "failed"
    UPCOMING = "upcoming"
    """Failed an item that is newer than the contract the plugin targets; such items are counted apart."""


@dataclass(frozen=True)
class Result:
    """How one item ended; `message` is complete enough for a bug report."""

    item: str
    tier: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    marks: tuple[str, ...] = ()

    @property
    def check(self) -> str:
        """The check's name."""
        return self.item.partition("[")[0]

    @property
    def case(self) -> str:
        """The case's id."""
        return self.item.partition("[")[2].removesuffix("]")

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "outcome": self.outcome.value, "marks": list(self.marks)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Result:
        """The inverse of `as_json`."""
        return cls(**{**row, "outcome": Outcome(row["outcome"]), "marks": tuple(row["marks"])})


@dataclass(frozen=True)
class Counts:
    """The six counts of a verdict."""

    passed: int = 0
    refused: int = 0
    declared: int = 0
    unjudged: int = 0
    failed: int = 0
    not_run: int = 0

    @classmethod
    def of(cls, results: Iterable[Result], items: int) -> Counts:
        """Of the results of a run, out of so many items."""
        found = Counter(result.outcome.value for result in results)
        return cls(**found, not_run=items - found.total())

    def __str__(self) -> str:
        """Five of them; what did not run is told by tier."""
        names = ("passed", "refused", "declared", "unjudged", "failed")
        return ", ".join(f"{getattr(self, name):,} {name}" for name in names)
