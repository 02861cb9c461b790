"""One thing that a judged backend is asked, and how it ended: four outcomes that are never added up under one word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How an item ended. WRONG alone fails a run."""

    RIGHT = "right"
    """Asked, and as the rule says."""
    WRONG = "wrong"
    """Asked, and not as the rule says."""
    NOT_SERVED = "not served"
    """The engine's own capability predicates say no; its reasons are kept."""
    NOT_ASKED = "not asked"
    """It cannot be asked here: this engine, release or device lacks what the question needs."""


@dataclass(frozen=True)
class Item:
    """One question about one input.

    Attributes:
        rule: name of the contract's rule that it asks about, e.g. ``"numerics.match_float64"``.
        case: a short stable slug of the input.
        run: asks; raises `ContractViolation` where the answer is wrong, `NotServed` or `NotAsked`.
        asks: how the rule is put to this backend, a sentence; "" where the rule's own words say it.
    """

    rule: str
    case: str
    run: Callable[[], None]
    asks: str = ""

    @property
    def id(self) -> str:
        """``"rule[case]"``: what `--item` takes."""
        return f"{self.rule}[{self.case}]"


class NotServed(Exception):
    """The engine's own predicates refuse the input, so the backend is not run on it."""


class NotAsked(Exception):
    """The question cannot be put here; the message says what lacks."""


@dataclass(frozen=True)
class Result:
    """How one item ended; `message` is complete enough for a bug report."""

    item: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0

    @property
    def rule(self) -> str:
        """The rule's name."""
        return self.item.partition("[")[0]

    @property
    def case(self) -> str:
        """The case's slug."""
        return self.item.partition("[")[2].removesuffix("]")

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Result:
        """The inverse of `as_json`."""
        return cls(**{**row, "outcome": Outcome(row["outcome"])})
