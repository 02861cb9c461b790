"""What queries and keys hold, as far as a softmax can tell. No torch."""

from __future__ import annotations

import random
from enum import StrEnum

from draftmark.geometry import AttentionShape

from ..oracle.history import Request

LARGE = 200.0
"""Scale of the queries: logits of hundreds."""
NEEDLE = 40.0
"""Length of a query that points at one key: its logit is forty, all others' are a third of that at most."""
LEVELS = (8.0, 12.0)
"""Entries of keys; with `level_query`, sums that float32 holds exactly."""
MOST = 1e5
"""Logits are this large at most. Kernels begin a row's maximum at a number (XQA: -1e5), and lose rows below it."""


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
    """Logits of 1e5, both signs: all of a row's keys on two levels, and rows whose best logit is -6e4."""


CONTRAST = {Contents.USUAL: 0.5, Contents.FLAT: 0.0, Contents.SPREAD: 2.0, Contents.LARGE: LARGE}
"""Scale of the queries where nothing else is special."""


def needle(request: Request, row: int, window_left: int, dice: random.Random) -> int:
    """A token of the request that the row sees; by preference one next to a multiple of a power of two, or an end."""
    own = request.own_slot(row)
    here = request.prefix + request.depth(own)
    oldest = max(0, here - window_left) if window_left >= 0 else 0
    tail = [request.prefix + slot for slot in request.seen(own) if request.prefix + request.depth(slot) >= oldest]
    if oldest >= request.prefix:
        return dice.choice(tail)
    step = 2 ** dice.randrange(3, 12)
    edges = [token for m in range(step, request.prefix + 1, step) for token in (m - 1, m)]
    kinds = (edges, [oldest, oldest + 1, request.prefix - 1, *tail], range(oldest, request.prefix))
    inside = [token for token in dice.choice(kinds) if oldest <= token < request.prefix or token in tail]
    return dice.choice(inside or tail)


def level_query(shape: AttentionShape) -> float:
    """Entries of queries whose logits, with keys of the higher level, come next to `MOST`; bf16 holds them exactly."""
    assert shape.softmax_scale is not None, "Geometry.create resolves the default"
    return 64 * (MOST / (max(LEVELS) * shape.head_dim * shape.softmax_scale) // 64)
