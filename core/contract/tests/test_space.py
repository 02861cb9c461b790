"""Tests of drawn sizes: which points are drawn, and that a forward has the sizes that were drawn for it."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from draftmark.geometry import AttentionShape, Form, Mode
from draftmark_contract.cases import sizes
from draftmark_contract.cases.drawn import Sizes
from draftmark_contract.cases.space import Point, covering, log_uniform

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (5, 6, 7, 8)}


def _met(points: list[Point]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for point in points for pair in combinations(point.items(), 2)}


def test_every_two_values_meet_in_few_points() -> None:
    """Each value of an axis meets each value of every other axis, in far fewer points than the product of the axes."""
    points = covering(AXES, random.Random(0))
    wanted = {frozenset({(a, x), (b, y)}) for a, b in combinations(AXES, 2) for x, y in product(AXES[a], AXES[b])}
    assert wanted <= _met(points)
    assert len(points) < 3 * 2 * 2 * 4 / 2


def test_first_points_and_impossible_pairs_are_kept() -> None:
    """The first points have the values given for them, and no point contains a pair that may not occur."""

    def possible(point: Point) -> bool:
        return not (point.get("a") == 1 and point.get("b") == "x")

    points = covering(AXES, random.Random(0), [{"a": 3, "e": "own"}], possible)
    assert points[0]["a"] == 3
    assert points[0]["e"] == "own"
    assert all(map(possible, points))
    assert frozenset({("a", 1), ("b", "y")}) in _met(points)


def test_log_uniform_stays_within_its_bounds_and_reaches_both() -> None:
    """Draws lie from the least to the most value, and small values are as likely as large ones."""
    dice = random.Random(0)
    drawn = [log_uniform(dice, 1, 64) for _ in range(2000)]
    assert {min(drawn), max(drawn)} == {1, 64}
    assert 0.4 < sum(one < 8 for one in drawn) / len(drawn) < 0.6


@pytest.mark.parametrize("mode", Mode)
def test_a_forward_has_its_sizes(mode: Mode) -> None:
    """A forward has the drawn mode, number of requests and longest request, and equal names draw alike."""
    wanted = Sizes(AttentionShape(2, 1, 64, 16), mode, 30, 2100, forms=(Form.ENGINE_SLOTS,))
    forward = wanted.draw("one")
    live = [one for one in forward.requests if one.live]
    assert forward == wanted.draw("one")
    assert forward != wanted.draw("two")
    assert (forward.mode, len(live)) == (mode, 30)
    assert max(one.prefix + one.tail for one in live) == 2100
    assert forward.unstored


def test_every_length_and_every_multiple_occurs() -> None:
    """The batches of one case contain each number of keys up to 700 once, and each multiple of 16 up to 1,024."""
    for case in sizes.every_length():
        keys = [one.prefix + one.tail for forward in case.value for one in forward.requests]
        assert sorted(keys) == list(range(1, 701))
        assert len({forward.geometry for forward in case.value}) == 1
    for case in sizes.multiples():
        ends = {one.prefix if "committed" in case.id else one.prefix + one.tail for one in case.value.requests}
        assert set(range(16, 1025, 16)) <= ends
