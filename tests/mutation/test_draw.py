"""Tests of the random selection of mutants."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.mutation.draw import drawn
from tools.mutation.mutation import mutations

SOURCE = "def f(a, b):\n    return a + b - 1\n"
EVERY = [*mutations("small", "def f(a):\n    return -a\n"), *mutations("one", SOURCE), *mutations("two", SOURCE)]
FEW = sum(one.module == "small" for one in EVERY)


@pytest.mark.parametrize("number", [1, 2, 7, len(EVERY), len(EVERY) + 1])
def test_a_draw_has_its_size_and_grows(number: int) -> None:
    """A draw has the requested size or all mutants, keeps their order, and is part of the next larger draw."""
    found = drawn(EVERY, number)
    assert len(found) == min(number, len(EVERY))
    assert [one for one in EVERY if one in found] == found
    assert {one.id for one in found} <= {one.id for one in drawn(EVERY, number + 1)}


def test_each_seed_has_its_own_draw() -> None:
    """Each seed draws a fixed set of mutants; two seeds draw different sets of equal size."""
    default, other = drawn(EVERY, FEW + 8), drawn(EVERY, FEW + 8, seed=1)
    assert len(other) == len(default) and other != default
    assert other == drawn(EVERY, FEW + 8, seed=1)


def test_a_draw_is_even() -> None:
    """A draw selects equally many mutants from every file. A file with fewer mutants gives all of them."""
    assert FEW < 4
    assert Counter(one.module for one in drawn(EVERY, FEW + 8)) == {"small": FEW, "one": 4, "two": 4}
