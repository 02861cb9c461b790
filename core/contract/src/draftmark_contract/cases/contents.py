"""What queries and keys hold, as far as a softmax can tell. No torch."""

from __future__ import annotations

import math
import random
from enum import StrEnum
from typing import TYPE_CHECKING

from draftmark.geometry import AttentionShape

from ..oracle.history import Request

if TYPE_CHECKING:
    from .forwards import ForwardCase

LARGE = 200.0
"""Scale of the queries: logits of hundreds."""
NEEDLE = 40.0
"""Length of a query that points at one key: its logit is forty, all others' are a third of that at most."""
LEVELS = (8.0, 12.0)
"""Entries of keys; with `level_query`, sums that float32 holds exactly."""
MOST = 1e5
"""Logits are this large at most."""
BELOW = 0.5
"""And half of that below zero. Kernels begin a row's maximum at a number (FlashInfer -5e4, XQA -1e5) and lose rows
whose best logit lies below it, which no model has; -1e4, of which masks are made, they have to bear."""


FAR_SINKS = (float("-inf"), -1e4, 30.0, 1e4, -30.0)
"""Sinks of neighbouring heads that count nothing, next to nothing, or nearly all."""


class Contents(StrEnum):
    """Kinds of rows and caches. Every kind is random but for what it says."""

    USUAL = "usual"
    """Weights stay near each other, so a key too many or too few shows in every output."""
    FLAT = "flat"
    """Queries of zero: every key weighs the same, whatever its logit is made of."""
    SPREAD = "spread"
    """Logits of a few: a wrong scale, cap or rounding of the weights shows."""
    LARGE = "large"
    """Logits of hundreds, so nearly one-hot rows, and a cap that is in full effect."""
    NEEDLES = "needles"
    """Each row and head points at one key, most of them on either side of a power of two: a key lost is all lost."""
    LEVELS = "levels"
    """Logits of 1e5, or of -5e4: all of a row's keys on two levels, and rows whose best logit is -3e4."""


CONTRAST = {Contents.USUAL: 0.5, Contents.FLAT: 0.0, Contents.SPREAD: 2.0, Contents.LARGE: LARGE}
"""Scale of the queries where nothing else is special."""


class Needles:
    """Tokens of a request that one row sees, to draw from: often one next to a multiple of a power of two, or an end.

    Args:
        window_left: keys that a row sees to its left; -1 for all.
    """

    def __init__(self, request: Request, row: int, window_left: int) -> None:
        own = request.own_slot(row)
        here = request.prefix + request.depth(own)
        self._prefix, self._oldest = request.prefix, max(0, here - window_left) if window_left >= 0 else 0
        places = ((slot, request.prefix + request.depth(slot)) for slot in request.seen(own))
        self._tail = [request.prefix + slot for slot, place in places if place >= self._oldest]

    def draw(self, dice: random.Random) -> int:
        """One of them."""
        if self._oldest >= self._prefix:
            return dice.choice(self._tail)
        kind = dice.randrange(3)
        edge = self._edge(2 ** dice.randrange(3, 12), dice) if kind == 0 else None
        if edge is not None:
            return edge
        if kind < 2:
            ends = (self._oldest, min(self._oldest + 1, self._prefix - 1), self._prefix - 1)
            return dice.choice(ends) if dice.randrange(2) else dice.choice(self._tail)
        return dice.randrange(self._oldest, self._prefix)

    def _edge(self, step: int, dice: random.Random) -> int | None:
        """A committed token on either side of a multiple of `step`; None where the draw finds none."""
        first, last = max(1, -(-self._oldest // step)), self._prefix // step
        token = dice.randint(first, max(first, last)) * step - dice.randrange(2)
        return token if self._oldest <= token < self._prefix else None


def level_query(shape: AttentionShape) -> float:
    """Entries of queries whose logits, with keys of the higher level, come next to `MOST`; bf16 holds them exactly."""
    assert shape.softmax_scale is not None, "Geometry.create resolves the default"
    return 64 * (MOST / (max(LEVELS) * shape.head_dim * shape.softmax_scale) // 64)


def usual_sink(forward: ForwardCase) -> float:
    """A sink that weighs about as much as all keys of a row together, where no key is special: ln of their number."""
    window = forward.geometry.attention.window_left
    seen = [one.prefix + one.tail for one in forward.requests if one.live] or [1]
    return math.log(sum(min(n, window + 1) if window >= 0 else n for n in seen) / len(seen) or 1)
