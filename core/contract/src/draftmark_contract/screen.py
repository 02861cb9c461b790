"""Prints findings (failed items) on one screen: the first of each rule in full while there is room, long texts cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

LONGEST = 30
"""Maximum number of lines of one finding, also when it is shown in full."""
WIDTH = 110
"""Maximum number of characters of a reason."""
REASONS = 4
"""Number of reasons that are quoted for each outcome."""


class Finding(Protocol):
    """A failed item of `draftmark contract` or `draftmark judge`."""

    @property
    def item(self) -> str:
        """Item id."""

    @property
    def case(self) -> str:
        """Case of the item: the text in the brackets of its id."""

    @property
    def message(self) -> str:
        """Full message of the finding."""


F = TypeVar("F", bound=Finding)


def in_full(
    groups: Sequence[Sequence[F]], screen: int, also: str, named_at_most: int
) -> tuple[list[str], Sequence[Sequence[F]]]:
    """Return (lines of the first finding of each group that fits on a screen, groups that do not fit).

    Args:
        screen: number of lines of the screen. The first group is always shown, up to `LONGEST` lines.
        also: label for the other findings of a group.
        named_at_most: maximum number of other findings to print by name.
    """
    lines: list[str] = []
    for number, group in enumerate(groups):
        full = _in_full(group, also, named_at_most)
        if lines and len(lines) + len(full) > screen:
            return lines, groups[number:]
        lines += full
    return lines, []


def named(results: Sequence[Finding], at_most: int) -> str:
    """Return the case names of the first `at_most` findings, then the number of the remaining ones."""
    shown = ", ".join(f"[{result.case}]" for result in results[:at_most])
    return shown + (f" and {len(results) - at_most} more" if len(results) > at_most else "")


def reasons(counts: Sequence[tuple[str, int]], indent: str) -> list[str]:
    """Return one line for each of the most frequent reasons, and one line that counts the remaining reasons."""
    lines = [f"{indent}{count:,} x {_short(reason)}" for reason, count in counts[:REASONS]]
    left = len(counts) - REASONS
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
