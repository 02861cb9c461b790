"""Selection of test settings: a small subset that contains every pair of values, and the rest marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def quick(settings: Iterable[tuple[Any, ...]], together: int = 2) -> list[Any]:
    """Return every setting as a pytest parameter; settings without new value pairs are marked slow.

    A bug of the decoding loop needs one value, or two together (e.g. a tree and a late step), rarely three. A few
    settings with every pair of values find almost all bugs. The selection is greedy: each step takes the setting with
    the most missing pairs, the first of equal ones.

    Args:
        settings: tuples of values, one value per parameter.
        together: size of the value groups to cover: 2 for pairs, 1 to cover each single value.
    """
    every = list(settings)
    groups = [set(combinations(enumerate(one), together)) for one in every]
    missing, chosen = set[Any]().union(*groups), set[int]()
    while missing:
        best = max(range(len(every)), key=lambda n: len(missing & groups[n]))
        chosen.add(best)
        missing -= groups[best]
    return [pytest.param(*one, marks=[] if n in chosen else [pytest.mark.slow]) for n, one in enumerate(every)]
