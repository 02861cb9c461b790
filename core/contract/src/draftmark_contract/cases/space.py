"""Draws points of a space of sizes, so that each pair of ranges meets in some point. Does not import torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, product

Point = dict[str, Hashable]
"""One value for each axis."""
CANDIDATES = 40
"""Number of random points from which each next point is chosen."""


def log_uniform(dice: random.Random, least: int, most: int) -> int:
    """Draw an integer from `least` to `most`, both at least 1, such that each factor of two is equally likely."""
    return min(most, int(math.exp(dice.uniform(math.log(least), math.log(most + 1)))))


def covering(
    axes: Mapping[str, Sequence[Hashable]],
    dice: random.Random,
    first: Sequence[Point] = (),
    possible: Callable[[Point], bool] = lambda point: True,
) -> list[Point]:
    """Return few points such that every value of an axis meets every value of every other axis.

    Args:
        axes: values of each axis.
        dice: source of all random choices. Equal states give equal points.
        first: values of the first points. A mapping may leave out axes, and may name values and axes of its own.
        possible: whether a point, or a part of one, may occur. Pairs that may not occur are not covered.
    """
    pairs = [((a, x), (b, y)) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])]
    still_open = dict.fromkeys(frozenset(pair) for pair in pairs if possible(dict(pair)))
    points: list[Point] = []

    def add(fixed: Point) -> None:
        drawn = [{name: dice.choice(values) for name, values in axes.items()} | fixed for _ in range(CANDIDATES)]
        best = max(filter(possible, drawn), key=lambda point: sum(pair in still_open for pair in _pairs(point)))
        points.append(best)
        for pair in _pairs(best):
            still_open.pop(pair, None)

    for one in first:
        add(one)
    while still_open:
        add(dict(next(iter(still_open))))
    return points


def _pairs(point: Point) -> list[frozenset[tuple[str, Hashable]]]:
    return [frozenset(pair) for pair in combinations(point.items(), 2)]
