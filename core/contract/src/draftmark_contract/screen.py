"""Findings on one screen, whoever they are of: the first of each rule in full while it fits, long texts cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

LONGEST = 30
"""Lines of one finding at most, in full too."""
WIDTH = 110
"""Characters of a reason at most."""
REASONS = 4
"""Reasons of each outcome that are quoted."""


class Finding(Protocol):
    """A result, of `draftmark contract` or of `draftmark judge`."""

    @property
    def item(self) -> str:
        """Its id."""

    @property
    def case(self) -> str:
        """What stands in the id's brackets."""

    @property
    def message(self) -> str:
        """All that is said of it."""


F = TypeVar("F", bound=Finding)


def in_full(
    groups: Sequence[Sequence[F]], screen: int, also: str, named_at_most: int
) -> tuple[list[str], Sequence[Sequence[F]]]:
    """The first finding of each group, as many groups as a screen holds, and the groups for which there is no room.

    Args:
        screen: lines; the first group is shown whatever its length, up to `LONGEST`.
        also: what the others of a group are called.
        named_at_most: how many of them are named.
    """
    lines: list[str] = []
    for number, group in enumerate(groups):
        full = _in_full(group, also, named_at_most)
        if lines and len(lines) + len(full) > screen:
            return lines, groups[number:]
        lines += full
    return lines, []


def named(results: Sequence[Finding], at_most: int) -> str:
    """The cases of some findings, the first ones by name."""
    shown = ", ".join(f"[{result.case}]" for result in results[:at_most])
    return shown + (f" and {len(results) - at_most} more" if len(results) > at_most else "")


def reasons(told: Sequence[tuple[str, int]], indent: str) -> list[str]:
    """A line for each of the most frequent reasons, and one for the rest."""
    lines = [f"{indent}{count:,} x {_short(reason)}" for reason, count in told[:REASONS]]
    left = len(told) - REASONS
    return [*lines, f"{indent}{left} other reasons, in --json FILE"] if left > 0 else lines


def _in_full(results: Sequence[Finding], also: str, at_most: int) -> list[str]:
    first, *others = results
    text = first.message.splitlines()
    if len(text) > LONGEST:
        text = [*text[: LONGEST - 2], f"  … {len(text) - LONGEST + 1} lines more", text[-1]]
    rest = [f"  {also}: {named(others, at_most)}"] if others else []
    return [first.item, *(f"  {line}" for line in text), *rest, ""]


def _short(reason: str) -> str:
    return reason if len(reason) <= WIDTH else f"{reason[: WIDTH - 1]}…"
