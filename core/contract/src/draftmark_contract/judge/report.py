"""Terminal report of a verdict: the first wrong item of each rule in full, then the number of items per outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..screen import in_full, named, reasons
from .item import Outcome, Result
from .verdict import Verdict, reasons_of

SCREEN = 60
"""Number of lines for findings in full."""
NAMED = 4
"""Number of further wrong items of a rule that are listed by name."""


def lines_of(verdict: Verdict) -> list[str]:
    """Return all lines to print for a verdict."""
    if verdict.error:
        return [f"{verdict.target} could not be judged: {verdict.error}"]
    if verdict.stopped:
        ran = f"{verdict.ran:,} items ran, {verdict.count(Outcome.WRONG):,} of them wrong; nothing is recorded"
        return [*finding_lines(verdict.results), f"{verdict.target} has no verdict, because {verdict.stopped}: {ran}"]
    return [*finding_lines(verdict.results), *_counts(verdict), *_nothing(verdict)]


def finding_lines(results: Sequence[Result]) -> list[str]:
    """Return the lines about wrong items, in the order in which the items ran."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.outcome is Outcome.WRONG:
            groups.setdefault(result.rule, []).append(result)
    lines, rest = in_full(list(groups.values()), SCREEN, "also wrong", NAMED)
    if rest:
        lines.append(f"{len(rest)} more rules are broken; --json FILE writes them in full:")
        lines += [f"  {group[0].rule}: {len(group)} wrong, {named(group, NAMED)}" for group in rest]
    return lines


def _nothing(verdict: Verdict) -> list[str]:
    """Return the lines for a run in which no item ran. The lines printed above them contain the reasons."""
    if verdict.ran:
        return []
    why = "none of the items could run here" if verdict.results else "the target has no item"
    return [f"{verdict.target} has no verdict, because {why}"]


def _counts(verdict: Verdict) -> list[str]:
    facts = verdict.facts
    more = ", ".join(value for name, value in facts.items() if name != "engine")
    right, wrong = verdict.count(Outcome.RIGHT), verdict.count(Outcome.WRONG)
    broken = ", ".join(map(str, verdict.rules_with(Outcome.WRONG)))
    counts = f"{verdict.ran:,} items run: {right:,} right, {wrong:,} wrong" + (f" (rules {broken})" if broken else "")
    lines = [f"{verdict.target} of {facts.get('engine', '?')} ({more}): {counts}"]
    for outcome in (Outcome.NOT_SERVED, Outcome.NOT_ASKED):
        if count := verdict.count(outcome):
            lines.append(f"  {outcome.value}: {count:,} items")
            lines += reasons(reasons_of(verdict.results, outcome), "    ")
    if not verdict.selected:
        if missing := verdict.items - len(verdict.results):
            lines.append(f"  not run: {missing:,} items")
        lines.append(f"  not asked: {len(verdict.left_out)} rules of the contract")
        lines += reasons(Counter(verdict.left_out.values()).most_common(), "    ")
    return lines
