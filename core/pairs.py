"""Which of many settings `make test` meets: as few as show each value beside each value of the others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def quick(settings: Iterable[tuple[Any, ...]], together: int = 2) -> list[Any]:
    """Every setting as a pytest parameter; those that show no new values together are marked slow.

    An error of the loop needs one value or two that meet (a tree and a late round), hardly ever three: a few settings
    that hold every pair find what all of them find. Each time the setting with most pairs that are still missing is
    taken, the first of equals.

    Args:
        together: how many values have to meet; 1 where each needs to be seen once.
    """
    every = list(settings)
    groups = [set(combinations(enumerate(one), together)) for one in every]
    missing, chosen = set[Any]().union(*groups), set[int]()
    while missing:
        best = max(range(len(every)), key=lambda n: len(missing & groups[n]))
        chosen.add(best)
        missing -= groups[best]
    return [pytest.param(*one, marks=[] if n in chosen else [pytest.mark.slow]) for n, one in enumerate(every)]
