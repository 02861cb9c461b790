"""What came of judging one target: its facts, what was asked with its result, and the rules that could not be asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR, __version__

from .item import Outcome, Result
from .rules import rules

SCHEMA = 1
UNSAID = "no question of this engine reaches it"


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    target: ``"vllm:CPU_ATTN"``.
    facts: of the target; empty where it did not open.
    items: how many it has; `results` are of those that were run.
    left_out: rules that no item asks about, with the reason.
    selected: whether only some items were to be run, so that this is no verdict on the whole.
    error: why it could not be opened; "" otherwise.
    """

    target: str
    facts: Mapping[str, str] = field(default_factory=dict)
    items: int = 0
    results: Sequence[Result] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    selected: bool = False
    error: str = ""

    def count(self, outcome: Outcome) -> int:
        """Items that ended so."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def exit_code(self) -> int:
        """0 where nothing is wrong, everything that was selected ran and something of it could be asked, else 1."""
        whole = self.selected or len(self.results) == self.items
        answered = any(result.outcome is not Outcome.NOT_ASKED for result in self.results)
        return int(bool(self.error) or bool(self.count(Outcome.WRONG)) or not whole or not answered)

    def as_json(self) -> dict[str, Any]:
        """Plain types, with every item."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "facts": dict(self.facts),
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
        """Numbers of the rules of which some item ended so, rising."""
        known = rules()
        names = {result.rule for result in self.results if result.outcome is outcome}
        return sorted(known[name].number for name in names if name in known)


def rules_left_out(asked: Sequence[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Every rule that no item asks about, with the reason that the target gives for it or for its module."""
    left = [name for name in rules() if name not in set(asked)]
    return {name: reasons.get(name) or reasons.get(name.partition(".")[0]) or UNSAID for name in left}


def reasons_of(results: Sequence[Result], outcome: Outcome) -> list[tuple[str, int]]:
    """First lines of the messages of an outcome, the most frequent first."""
    return Counter(one.message.partition("\n")[0] for one in results if one.outcome is outcome).most_common()
