"""Terminal report of a run: the failed checks, on at most one screen, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..screen import in_full, named, reasons
from .outcome import Outcome, Result
from .subject import Kind
from .verdict import Verdict

SCREEN = 40
"""Number of lines for failures in full."""
LISTED = 12
"""Number of further failed checks with one line each; the rest are counted."""
NAMED = 3
"""Number of further failed items that a line names."""


def failure_lines(verdict: Verdict) -> list[str]:
    """Return lines about failed checks in the suite's order: in full while they fit on a screen, then one line each."""
    groups: dict[str, list[Result]] = {}
    for result in verdict.failures:
        groups.setdefault(result.check, []).append(result)
    lines, rest = in_full(list(groups.values()), SCREEN, "also", NAMED)
    if rest:
        lines += [f"{len(rest)} more checks fail; --json FILE and --html FILE write them in full:"]
        lines += map(_in_a_line, rest[:LISTED])
        lines += [f"  and {len(rest) - LISTED} more"] if len(rest) > LISTED else []
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return the verdict line, the facts of a layer, and the reasons why items were neither passed nor failed."""
    lines = [verdict.line]
    if verdict.kind is Kind.LAYER and verdict.facts:
        broken = ", ".join(map(str, verdict.rules_with(Outcome.FAILED)))
        lines += [f"  {', '.join(verdict.facts.values())}", *([f"  broken rules: {broken}"] if broken else [])]
    lines += [line for outcome in _EXPLAINED for line in _reasons(verdict.results, outcome)]
    if left := verdict.rules_left_out:
        lines += [f"  without an item: {len(left)} rules", *reasons(Counter(left.values()).most_common(), "    ")]
    return lines


_EXPLAINED = (Outcome.REFUSED, Outcome.DECLARED, Outcome.UNJUDGED, Outcome.UPCOMING)


def _in_a_line(results: Sequence[Result]) -> str:
    return f"  {results[0].check}: {len(results)} fail, {named(results, NAMED)}"


def _reasons(results: Iterable[Result], outcome: Outcome) -> list[str]:
    counts = Counter(_reason(result) for result in results if result.outcome is outcome)
    return reasons(counts.most_common(), f"  {outcome.value}: ")


def _reason(result: Result) -> str:
    """Return the reason in one line. For an upcoming item it is the check's name, which groups its items."""
    return result.check if result.outcome is Outcome.UPCOMING else result.message.partition("\n")[0]
