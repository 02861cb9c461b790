"""What every query row must see and write, enumerated token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .history import Request, kv_slots

Row = tuple[int, int]
"""(request, query row of that request)."""


@dataclass(frozen=True)
class Truth:
    """Attributes:
    visible: KV slots that each row attends to, sorted; each exactly once.
    writes: the KV slot that each row stores.
    """

    visible: dict[Row, tuple[int, ...]]
    writes: dict[Row, int]


def enumerate_truth(requests: Sequence[Request], page_size: int, window_left: int) -> Truth:
    """The definition: a row sees the tokens at most `window_left` positions to its left, if they are its ancestors.

    Every committed token is an ancestor of every row; in the tail, ancestors follow the parents. The distance is
    measured in positions, so siblings of a draft tree do not push each other out of the window.
    """
    visible: dict[Row, tuple[int, ...]] = {}
    writes: dict[Row, int] = {}
    for number, request in enumerate(requests):
        slots = kv_slots(request, page_size)
        for row in range(request.rows):
            own = request.own_slot(row)
            here = request.prefix + request.depth(own)
            seen = [slots[token] for token in range(request.prefix) if _near(here - token, window_left)]
            for ancestor in request.lineage(own):
                there = request.prefix + request.depth(ancestor)
                if _near(here - there, window_left):
                    seen.append(slots[request.prefix + ancestor])
            visible[number, row] = tuple(sorted(seen))
            writes[number, row] = slots[request.prefix + own]
    return Truth(visible, writes)


def _near(distance: int, window_left: int) -> bool:
    return window_left < 0 or distance <= window_left
