"""Random cases: each factor is drawn independently, over the ranges that `grid` varies one or two at a time.

They show where a heuristic fits only the grid's cases. One seed always draws the same cases.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from .cases import Case, ragged_lens
from .grid import PAGES, case
from .models import MODELS, Model

RANKS = (1, 1, 2, 4, 8)
KINDS = {"decode": 3, "chain": 3, "uneven": 2, "draft": 2, "verify": 8, "extend": 2, "chunk": 3, "chunks": 1}
"""Weight of each kind of forward in the draw."""
ROWS = {"chain": (2, 9), "uneven": (2, 9), "draft": (2, 16), "verify": (2, 256), "chunk": (8, 2048), "chunks": (8, 512)}
MOST_BYTES, MOST_FLOPS = 3 << 30, 2e12
"""Limits of a case's KV and attention FLOPs, so that dozens fit a minute."""


def drawn(count: int, seed: int) -> tuple[Case, ...]:
    """Draw `count` cases with different names.

    Args:
        seed: seed of the draw.
    """
    chance, found = random.Random(seed), {}
    while len(found) < count:
        one = _draw(chance)
        if _fits(one):
            found[one.name] = one
    return tuple(found.values())


def _draw(chance: random.Random) -> Case:
    model = _rank(chance.choice(list(MODELS.values())), chance.choice(RANKS))
    model = model.paged(chance.choice(PAGES))
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    requests, length = _spread(chance, 1, 256), _spread(chance, 128, 65536)
    rows = _spread(chance, *ROWS[kind]) if kind in ROWS else 1
    if kind == "extend" or chance.random() < 0.7:
        return case(model, kind, (length,) * requests, rows)
    return case(model, kind, ragged_lens(requests, length), rows, f"{requests}xragged{length}")


def _rank(model: Model, ranks: int) -> Model:
    """Return one rank's share of a model, or the whole model if its KV heads cannot be divided."""
    if model.kv_heads % ranks:
        return model
    return replace(model, heads=model.heads // ranks, kv_heads=model.kv_heads // ranks)


def _spread(chance: random.Random, least: int, most: int) -> int:
    """Draw a number with a uniform logarithm, so each factor of two is equally likely."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


def _fits(one: Case) -> bool:
    model, total = one.model, 0.0
    for length, rows in zip(one.lens, one.q_lens, strict=True):
        total += 4 * rows * (model.seen(length) + rows) * model.heads * model.dim
    return one.held_bytes <= MOST_BYTES and total <= MOST_FLOPS
