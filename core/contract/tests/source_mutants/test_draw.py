"""A draw is the same every time and fair to small files."""

from __future__ import annotations

from collections import Counter

import pytest

from .draw import drawn
from .mutation import mutations

SOURCE = "def f(a, b):\n    return a + b - 1\n"
EVERY = [*mutations("small", "def f(a):\n    return -a\n"), *mutations("one", SOURCE), *mutations("two", SOURCE)]
FEW = sum(one.module == "small" for one in EVERY)


@pytest.mark.parametrize("number", [1, 2, 7, len(EVERY), len(EVERY) + 1])
def test_a_draw_has_its_size_and_grows(number: int) -> None:
    """As many as asked for, or all; in the order in which they were given; each draw within the next."""
    found = drawn(EVERY, number)
    assert len(found) == min(number, len(EVERY))
    assert [one for one in EVERY if one in found] == found
    assert {one.id for one in found} <= {one.id for one in drawn(EVERY, number + 1)}


def test_another_seed_draws_others() -> None:
    """A seed has its own draw, as large, and the same one each time."""
    default, other = drawn(EVERY, FEW + 8), drawn(EVERY, FEW + 8, seed=1)
    assert len(other) == len(default) and other != default
    assert other == drawn(EVERY, FEW + 8, seed=1)


def test_a_draw_is_even() -> None:
    """Files give alike, and a small one what it has."""
    assert FEW < 4
    assert Counter(one.module for one in drawn(EVERY, FEW + 8)) == {"small": FEW, "one": 4, "two": 4}
