"""Selection of test settings: small subsets of all combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, cycle, islice
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


def in_turn(things: Mapping[str, Any], partners: Iterable[str], each: int = 2) -> list[Any]:
    """Return each thing with `each` of the partners as pytest parameters; the partners alternate.

    Args:
        things: values by name. The name is the first part of the test's id.
        partners: names, at least `each`.
    """
    turns = cycle(partners)
    pairs = ((name, one, partner) for name, one in things.items() for partner in islice(turns, each))
    return [pytest.param(one, partner, id=f"{name}-{partner}") for name, one, partner in pairs]
