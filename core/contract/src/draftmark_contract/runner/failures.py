"""What did not pass, for a terminal: one screen, whatever happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .outcome import Outcome, Result
from .verdict import Verdict

SCREEN = 40
"""Lines that failures take in full; the first one is shown whatever its length, up to `LONGEST`."""
LONGEST = 30
LISTED = 12
"""Checks that have a line each below those in full; the others are counted."""
NAMED = 3
"""Further items of a check that a line names."""
WIDTH = 110
REASONS = 4
"""Reasons of each outcome that are quoted below the verdict."""


def failure_lines(verdict: Verdict) -> list[str]:
    """Checks that fail, in the order of learning: the first item of each in full while it fits, then a line each."""
    groups: dict[str, list[Result]] = {}
    for result in verdict.results:
        if result.outcome is Outcome.FAILED:
            groups.setdefault(result.check, []).append(result)
    lines: list[str] = []
    rest = list(groups.values())
    while rest:
        full = _in_full(rest[0])
        if lines and len(lines) + len(full) > SCREEN:
            break
        lines += full
        rest.pop(0)
    if rest:
        lines += [f"{len(rest)} more checks fail, in --json FILE and --html FILE in full:"]
        lines += map(_in_a_line, rest[:LISTED])
        lines += [f"  and {len(rest) - LISTED} more"] if len(rest) > LISTED else []
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    """The verdict, and below it why items were refused, declared, or not judged."""
    return [verdict.line, *(line for outcome in _EXPLAINED for line in _reasons(verdict.results, outcome))]


_EXPLAINED = (Outcome.REFUSED, Outcome.DECLARED, Outcome.UNJUDGED, Outcome.UPCOMING)


def _in_full(results: Sequence[Result]) -> list[str]:
    first, *others = results
    text = first.message.splitlines()
    if len(text) > LONGEST:
        text = [*text[: LONGEST - 2], f"  … {len(text) - LONGEST + 1} lines more", text[-1]]
    also = [f"  also: {_named(others)}"] if others else []
    return [first.item, *(f"  {line}" for line in text), *also, ""]


def _in_a_line(results: Sequence[Result]) -> str:
    return f"  {results[0].check}: {len(results)} fail, {_named(results)}"


def _named(results: Sequence[Result]) -> str:
    shown = ", ".join(f"[{result.case}]" for result in results[:NAMED])
    return shown + (f" and {len(results) - NAMED} more" if len(results) > NAMED else "")


def _reasons(results: Iterable[Result], outcome: Outcome) -> list[str]:
    told = Counter(_said(result) for result in results if result.outcome is outcome)
    lines = [f"  {outcome.value}: {count:,} x {_short(reason)}" for reason, count in told.most_common(REASONS)]
    left = len(told) - REASONS
    return [*lines, f"  {outcome.value}: {left} other reasons, in --json FILE"] if left > 0 else lines


def _short(reason: str) -> str:
    return reason if len(reason) <= WIDTH else f"{reason[: WIDTH - 1]}…"


def _said(result: Result) -> str:
    """A reason in one line: of a failure its check alone, since its message speaks of one batch."""
    return result.check if result.outcome is Outcome.UPCOMING else result.message.partition("\n")[0]
