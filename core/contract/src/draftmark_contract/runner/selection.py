"""Selects items by id, by an expression over their ids, and by number."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from draftmark_tools.cli.errors import ArgumentError

from ..check import spread

WORD = re.compile(r"\s*([()]|[^\s()]+)")
Match = Callable[[str], bool]


def select(known: Sequence[str], items: Sequence[str] = (), k: str = "", sample: int = 0) -> list[str]:
    """Return the selected ids in the order of `known`.

    Args:
        known: ids of all items.
        items: ids to select; () for all.
        k: expression over ids, see `expression`; "" for all.
        sample: maximum number of items per check, evenly spread; 0 for all.

    Raises:
        ArgumentError: an id is unknown, `k` is no expression, or nothing is selected.
    """
    if unknown := next((one for one in items if one not in known), None):
        close = difflib.get_close_matches(unknown, known, 3)
        near = f"close to it are {', '.join(close)}" if close else "-k TEXT selects items by a part of the name"
        raise ArgumentError(f"--item {unknown!r} is no item here; {near}")
    matches = expression(k)
    by_check: dict[str, list[str]] = {}
    for one in known:
        if (not items or one in items) and matches(one):
            by_check.setdefault(one.partition("[")[0], []).append(one)
    if k and known and not by_check:
        raise ArgumentError(f"-k {k!r} selects no item; write a part of an item's id, as in -k graphs")
    chosen = {one for mine in by_check.values() for one in spread(mine, sample)}
    return [one for one in known if one in chosen]


def expression(k: str) -> Match:
    """Return a function that tells whether an item id matches `k`, without regard to case.

    `k` has parts of ids, ``and``, ``or``, ``not`` and parentheses. An empty expression matches every id.

    Raises:
        ArgumentError: `k` is no expression.
    """
    words = WORD.findall(k)
    if not words:
        return lambda item: True
    reader = _Reader(words)
    found = reader.alternatives()
    if found is None or reader.words:
        rest = f"{reader.words[0]!r} is unexpected" if reader.words else "a part is missing at its end"
        remedy = "write parts of ids with and, or, not and parentheses, as in -k 'graphs and not wide'"
        raise ArgumentError(f"-k {k!r} is no expression: {rest}; {remedy}")
    return found


def _inverse(match: Match) -> Match:
    return lambda item: not match(item)


class _Reader:
    """Reads an expression from its words. Each method returns None where the next word does not fit."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def alternatives(self) -> Match | None:
        """Read terms that are joined by ``or``."""
        return self._joined("or", self._terms, any)

    def _terms(self) -> Match | None:
        return self._joined("and", self._term, all)

    def _joined(self, word: str, read: Callable[[], Match | None], join: Callable[..., bool]) -> Match | None:
        parts = [read()]
        while self._take(word):
            parts.append(read())
        found = [one for one in parts if one is not None]
        return (lambda item: join(one(item) for one in found)) if len(found) == len(parts) else None

    def _term(self) -> Match | None:
        if self._take("not"):
            inner = self._term()
            return None if inner is None else _inverse(inner)
        if self._take("("):
            inner = self.alternatives()
            return inner if inner is not None and self._take(")") else None
        if not self.words or self.words[0] in ("and", "or", ")"):
            return None
        text = self.words.pop(0).lower()
        return lambda item: text in item.lower()

    def _take(self, word: str) -> bool:
        if not self.words or self.words[0] != word:
            return False
        self.words.pop(0)
        return True
