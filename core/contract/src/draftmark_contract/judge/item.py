"""One item of `draftmark judge` (one rule on one input) and its outcome. Each kind of outcome is counted separately."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..check import Refused, Unjudged
from ..failing_batch import Drawing
from ..runner.item import Item as Item
from ..runner.item import item_of as item_of

NotServed, NotAsked = Refused, Unjudged
"""Older names of the two exceptions."""


class Outcome(StrEnum):
    """Possible outcomes of an item. Only WRONG fails a run."""

    RIGHT = "right"
    """The item ran and the backend meets the rule."""
    WRONG = "wrong"
    """The item ran and the backend breaks the rule."""
    NOT_SERVED = "not served"
    """The engine's own capability checks reject the input; the message keeps the reasons."""
    NOT_ASKED = "not asked"
    """The item cannot run here: this engine, release or device lacks something that it needs."""


@dataclass(frozen=True)
class Result:
    """Holds the outcome of one item. `message` is complete enough for a bug report.

    `drawing` is the batch of a wrong item as plain data (`failing_batch.drawing`), for a report. Other items have None.
    """

    item: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    drawing: Drawing | None = None

    @property
    def rule(self) -> str:
        """Name of the rule."""
        return self.item.partition("[")[0]

    @property
    def case(self) -> str:
        """Name of the input."""
        return self.item.partition("[")[2].removesuffix("]")

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain types. Only a wrong item with a batch has the key ``drawing``."""
        row = {**asdict(self), "outcome": self.outcome.value}
        return row if self.drawing else {name: value for name, value in row.items() if name != "drawing"}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Result:
        """Read a result that `as_json` returned."""
        return cls(**{**row, "outcome": Outcome(row["outcome"])})
