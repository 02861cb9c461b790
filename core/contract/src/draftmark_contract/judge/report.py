"""A verdict for a terminal: the first wrong item of each rule in full, then the counts apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .item import Outcome, Result
from .verdict import Verdict, reasons_of

SCREEN = 60
"""Lines that findings take in full; the first is shown whatever its length, up to `LONGEST`."""
LONGEST = 30
NAMED = 4
"""Further items of a rule that are named."""
REASONS = 4
WIDTH = 110


def lines_of(verdict: Verdict) -> list[str]:
    """Everything that is printed of a verdict."""
    if verdict.error:
        return [f"{verdict.target} could not be judged: {verdict.error}"]
    return [*finding_lines(verdict.results), *_counts(verdict)]


def finding_lines(results: Sequence[Result]) -> list[str]:
    """What is wrong, in the order in which it was asked."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.outcome is Outcome.WRONG:
            groups.setdefault(result.rule, []).append(result)
    lines: list[str] = []
    rest = list(groups.values())
    while rest:
        full = _in_full(rest[0])
        if lines and len(lines) + len(full) > SCREEN:
            break
        lines += full
        rest.pop(0)
    if rest:
        lines.append(f"{len(rest)} more rules are broken; --json FILE has them in full:")
        lines += [f"  {group[0].rule}: {len(group)} wrong, {_named(group)}" for group in rest]
    return lines


def _in_full(results: Sequence[Result]) -> list[str]:
    first, *others = results
    text = first.message.splitlines()
    if len(text) > LONGEST:
        text = [*text[: LONGEST - 2], f"  … {len(text) - LONGEST + 1} lines more", text[-1]]
    also = [f"  also wrong: {_named(others)}"] if others else []
    return [first.item, *(f"  {line}" for line in text), *also, ""]


def _named(results: Sequence[Result]) -> str:
    shown = ", ".join(f"[{result.case}]" for result in results[:NAMED])
    return shown + (f" and {len(results) - NAMED} more" if len(results) > NAMED else "")


def _counts(verdict: Verdict) -> list[str]:
    facts = verdict.facts
    more = ", ".join(value for name, value in facts.items() if name != "engine")
    right, wrong = verdict.count(Outcome.RIGHT), verdict.count(Outcome.WRONG)
    broken = ", ".join(map(str, verdict.rules_with(Outcome.WRONG)))
    asked = f"{right + wrong:,} items asked: {right:,} right, {wrong:,} wrong" + (
        f" (rules {broken})" if broken else ""
    )
    lines = [f"{verdict.target} of {facts.get('engine', '?')} ({more}): {asked}"]
    for outcome in (Outcome.NOT_SERVED, Outcome.NOT_ASKED):
        if count := verdict.count(outcome):
            lines.append(f"  {outcome.value}: {count:,} items")
            lines += _reasons(reasons_of(verdict.results, outcome))
    if not verdict.selected:
        if missing := verdict.items - len(verdict.results):
            lines.append(f"  not run: {missing:,} items")
        lines.append(f"  not asked: {len(verdict.left_out)} rules of the contract")
        lines += _reasons(Counter(verdict.left_out.values()).most_common())
    return lines


def _reasons(told: Sequence[tuple[str, int]]) -> list[str]:
    lines = [f"    {count:,} x {_short(reason)}" for reason, count in told[:REASONS]]
    left = len(told) - REASONS
    return [*lines, f"    {left} other reasons, in --json FILE"] if left > 0 else lines


def _short(reason: str) -> str:
    return reason if len(reason) <= WIDTH else f"{reason[: WIDTH - 1]}…"
