"""Kinds of test values for queries and keys, grouped by their effect on a softmax. Does not import torch."""

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
"""Scale of the queries that gives logits of hundreds."""
NEEDLE = 40.0
"""Length of a query that points at one key. The logit of that key is 40; all other logits are at most a third of it."""
LEVELS = (8.0, 12.0)
"""Entries of keys. With `level_query` they give sums that float32 represents exactly."""
MOST = 1e5
"""Largest logit."""
BELOW = 0.5
"""Size of the most negative logit as a fraction of `MOST`. Kernels start a row's maximum at a finite number (FlashInfer
-5e4, XQA -1e5) and lose rows with a best logit below it. No model has such rows. Masks use -1e4, which must work."""


FAR_SINKS = (float("-inf"), -1e4, 30.0, 1e4, -30.0)
"""Sinks of neighbouring heads: some have no weight, some almost none, and some nearly all of it."""


class Contents(StrEnum):
    """Kinds of values with which the rows and the KV cache are filled. Values are random except as described."""

    USUAL = "usual"
    """Weights stay close to each other, so one extra or missing key changes every output."""
    FLAT = "flat"
    """Queries are zero, so every key has the same weight."""
    SPREAD = "spread"
    """Logits of a few units, so a wrong scale, cap or rounding of the weights shows."""
    LARGE = "large"
    """Logits of hundreds: rows are nearly one-hot, and a soft cap has its full effect."""
    NEEDLES = "needles"
    """Each row and head points at one key, often next to a power of two, so one missing key loses the whole output."""
    LEVELS = "levels"
    """Logits of 1e5 or -5e4: all keys of a row are on two levels, and some rows have a best logit of -3e4."""
    COUNTED = "counted"
    """Every key has the same weight, and a value of 1 in one dimension and 0 in the others. One key too few or too many
    changes an output by more than the tolerance of bfloat16, in rows of thousands of keys."""
    WEIGHED = "weighed"
    """Values as in `COUNTED`. Every third pair of row and head weighs all keys equally; the other pairs have logits of
    several units or of dozens. So a missing key, scale, cap, sink or mask shows in rows of thousands of keys."""


CONTRAST = {
    Contents.USUAL: 0.5,
    Contents.FLAT: 0.0,
    Contents.SPREAD: 2.0,
    Contents.LARGE: LARGE,
    Contents.COUNTED: 0.0,
}
"""Scale of the random queries for the kinds that need no other treatment."""
COUNTABLE = (Contents.COUNTED, Contents.WEIGHED)
"""Kinds in which each value vector has one entry that is not zero."""
CONTRASTS = (0.0, 3.0, 12.0)
"""Scales of the random queries of neighboring heads with `WEIGHED` contents."""


class Needles:
    """Draws keys that one row sees. The first and last keys, and keys next to a multiple of 8 to 2048, are likelier.

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
        """Draw one key that the row sees; return its token index in the request."""
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
        """Draw a committed token next to a multiple of `step`. Return None if the row does not see the drawn token."""
        first, last = max(1, -(-self._oldest // step)), self._prefix // step
        token = dice.randint(first, max(first, last)) * step - dice.randrange(2)
        return token if self._oldest <= token < self._prefix else None


def level_query(shape: AttentionShape) -> float:
    """Return the value of each query entry that makes the largest logits about `MOST`. It is exact in bfloat16."""
    assert shape.softmax_scale is not None, "Geometry.create resolves the default"
    return 64 * (MOST / (max(LEVELS) * shape.head_dim * shape.softmax_scale) // 64)


def usual_sink(forward: ForwardCase) -> float:
    """Return the sink logit with about the weight of all keys of a row together: the log of the mean number of keys."""
    window = forward.geometry.attention.window_left
    seen = [one.prefix + one.tail for one in forward.requests if one.live] or [1]
    return math.log(sum(min(n, window + 1) if window >= 0 else n for n in seen) / len(seen) or 1)
