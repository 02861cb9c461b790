"""Verdict on one target (backend of an engine): its facts, the results of its items, and the rules without an item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR, __version__

from ..runner.stopped import WITHOUT_VERDICT
from .item import Outcome, Result
from .rules import rules

SCHEMA = 1
UNSAID = "no item of this engine checks it"


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict on one target (a backend of an engine).

    Attributes:
        target: name of the target, e.g. ``"vllm:CPU_ATTN"``.
        facts: facts of the target; empty if it did not open.
        items: number of items that the target has; `results` contains the items that ran.
        left_out: rules without an item, each with the reason.
        selected: True if only some items were selected; the verdict then does not cover the whole backend.
        error: reason why the target could not be opened; "" otherwise.
        machine: day, processor, versions and compiler variables of the worker processes, see `runner.machine`.
        stopped: reason why the run gives no verdict, as a clause: "the run was interrupted"; "" otherwise.
    """

    target: str
    facts: Mapping[str, str] = field(default_factory=dict)
    items: int = 0
    results: Sequence[Result] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    selected: bool = False
    error: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""

    def count(self, outcome: Outcome) -> int:
        """Return the number of items with this outcome."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if no item is wrong and at least one ran, 2 if the run was stopped, otherwise 1."""
        if self.stopped:
            return WITHOUT_VERDICT
        return int(bool(self.error) or bool(self.count(Outcome.WRONG)) or not self.ran)

    @property
    def ran(self) -> int:
        """Number of items that ran: right and wrong ones."""
        return self.count(Outcome.RIGHT) + self.count(Outcome.WRONG)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict with every item, as plain types."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "facts": dict(self.facts),
            "machine": dict(self.machine),
            "suite": {"draftmark": __version__, "contract": f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}"},
            "error": self.error,
            "selected": self.selected,
            "counts": {outcome.value: self.count(outcome) for outcome in Outcome},
            "not_run": self.items - len(self.results),
            "rules": {outcome.value: self.rules_with(outcome) for outcome in (Outcome.RIGHT, Outcome.WRONG)},
            "rules_not_asked": dict(self.left_out),
            "results": [result.as_json() for result in self.results],
        }

    def rules_with(self, outcome: Outcome) -> list[int]:
        """Return the sorted numbers of rules that have an item with this outcome."""
        known = rules()
        names = {result.rule for result in self.results if result.outcome is outcome}
        return sorted(known[name].number for name in names if name in known)


def rules_left_out(covered: Sequence[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return every rule without an item → the reason that the target gives for the rule or for its module."""
    left = [name for name in rules() if name not in set(covered)]
    return {name: reasons.get(name) or reasons.get(name.partition(".")[0]) or UNSAID for name in left}


def reasons_of(results: Sequence[Result], outcome: Outcome) -> list[tuple[str, int]]:
    """Return the first lines of the messages with this outcome, each with its count, the most frequent first."""
    return Counter(one.message.partition("\n")[0] for one in results if one.outcome is outcome).most_common()
