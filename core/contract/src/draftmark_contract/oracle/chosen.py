"""Lists of chosen keys: what an indexer could choose for each row, and the KV slots that the row then attends to.

Plain Python, no torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .history import Request
from .truth import Row, Truth

NOTHING = -1
"""Entry of a list that names no key."""
WHOLE = -1
"""Draw in which each list names every key that its row sees."""
KINDS = ("full", "one", "none", "holes", "ascending", "only holes")
"""Kinds of lists, by turns: of neighboring rows, and of one row in neighboring draws."""

Lists = Mapping[Row, tuple[int, ...]]
"""Entries of each row's list; their number is the row's count."""


def choose(truth: Truth, requests: Sequence[Request], width: int, draw: int) -> dict[Row, tuple[int, ...]]:
    """Return a list for each row, from the slots that the row sees without lists.

    Args:
        width: most entries of a list.
        draw: number that decides the lists, or `WHOLE`.
    """
    found: dict[Row, tuple[int, ...]] = {}
    for number, (row, seen) in enumerate(truth.visible.items()):
        if draw == WHOLE:
            found[row] = tuple(seen)
            continue
        if not requests[row[0]].live:
            found[row] = tuple(seen[:width]) if (number + draw) % 2 else ()
            continue
        dice = random.Random(f"chosen {draw} {row}")
        found[row] = _list(KINDS[(number + draw) % len(KINDS)], list(seen), width, dice)
    return found


def _list(kind: str, seen: list[int], width: int, dice: random.Random) -> tuple[int, ...]:
    """Return one list of a kind."""
    most = min(len(seen), width)
    if kind == "none":
        return ()
    if kind == "one":
        return (dice.choice(seen),)
    if kind == "only holes":
        return (NOTHING,) * dice.choice((1, width))
    if kind == "holes":
        keys = dice.sample(seen, dice.randint(1, max(1, min(most, width // 2))))
        entries = keys + [NOTHING] * dice.randint(0, width - len(keys))
        dice.shuffle(entries)
        return tuple(entries)
    chosen = dice.sample(seen, most)
    return tuple(sorted(chosen) if kind == "ascending" else chosen)


def restricted(truth: Truth, lists: Lists) -> Truth:
    """Return the truth in which each row sees the keys of its list only."""
    visible = {row: tuple(sorted(slot for slot in entries if slot != NOTHING)) for row, entries in lists.items()}
    return Truth(visible, truth.writes)
