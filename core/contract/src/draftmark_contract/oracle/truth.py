"""KV slots that every query row must see and write, enumerated token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .history import Request, kv_slots

Row = tuple[int, int]
"""(request, query row of that request)."""


@dataclass(frozen=True)
class Truth:
    """Holds the KV slots that the rows of a batch must see and write.

    Attributes:
        visible: sorted KV slots that each row attends to, each slot once.
        writes: KV slot that each row is stored in.
    """

    visible: dict[Row, tuple[int, ...]]
    writes: dict[Row, int]


def enumerate_truth(requests: Sequence[Request], page_size: int, window_left: int) -> Truth:
    """Return the KV slots: a row sees the tokens of its mask that are at most `window_left` positions to its left.

    Every row sees every committed token within the window. Among the new tokens (tail) a mask can name
    ancestors or any other slots. The distance is measured in positions, so siblings
    of a draft tree do not push each other out of the window.
    """
    visible: dict[Row, tuple[int, ...]] = {}
    writes: dict[Row, int] = {}
    for number, request in enumerate(requests):
        slots = kv_slots(request, page_size)
        for row in range(request.rows):
            own = request.own_slot(row)
            here = request.prefix + request.depth(own)
            oldest = max(0, here - window_left) if window_left >= 0 else 0
            seen = slots[oldest : request.prefix]
            tail = [one for one in request.seen(own) if request.prefix + request.depth(one) >= oldest]
            seen += [slots[request.prefix + one] for one in tail]
            visible[number, row] = tuple(sorted(seen))
            writes[number, row] = slots[request.prefix + own]
    return Truth(visible, writes)
