"""What did not pass, for a terminal: one screen, whatever happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..screen import in_full, named, reasons
from .outcome import Outcome, Result
from .verdict import Verdict

SCREEN = 40
"""Lines that failures take in full."""
LISTED = 12
"""Checks that have a line each below those in full; the others are counted."""
NAMED = 3
"""Further items of a check that a line names."""


def failure_lines(verdict: Verdict) -> list[str]:
    """Checks that fail, in the order of learning: the first item of each in full while it fits, then a line each."""
    groups: dict[str, list[Result]] = {}
    for result in verdict.results:
        if result.outcome is Outcome.FAILED:
            groups.setdefault(result.check, []).append(result)
    lines, rest = in_full(list(groups.values()), SCREEN, "also", NAMED)
    if rest:
        lines += [f"{len(rest)} more checks fail, in --json FILE and --html FILE in full:"]
        lines += map(_in_a_line, rest[:LISTED])
        lines += [f"  and {len(rest) - LISTED} more"] if len(rest) > LISTED else []
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    """The verdict, and below it why items were refused, declared, or not judged."""
    return [verdict.line, *(line for outcome in _EXPLAINED for line in _reasons(verdict.results, outcome))]


_EXPLAINED = (Outcome.REFUSED, Outcome.DECLARED, Outcome.UNJUDGED, Outcome.UPCOMING)


def _in_a_line(results: Sequence[Result]) -> str:
    return f"  {results[0].check}: {len(results)} fail, {named(results, NAMED)}"


def _reasons(results: Iterable[Result], outcome: Outcome) -> list[str]:
    told = Counter(_said(result) for result in results if result.outcome is outcome)
    return reasons(told.most_common(), f"  {outcome.value}: ")


def _said(result: Result) -> str:
    """A reason in one line: of a failure its check alone, since its message speaks of one batch."""
    return result.check if result.outcome is Outcome.UPCOMING else result.message.partition("\n")[0]
