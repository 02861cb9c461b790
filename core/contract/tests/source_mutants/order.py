"""In which order a mutant meets the items: what has killed before, a sample of every check, the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from draftmark_contract.check import spread

from .baseline import Baseline, Known
from .mutation import Mutation

FIRST, OF_EACH = 30, 2
"""Items that kill most in a second, and items of each check, that a mutant meets first."""


def order(mutation: Mutation, baseline: Baseline, kills: Counter[str], killer: str | None = None) -> list[str]:
    """Items that reach the mutant's statement: the one that killed it before, the likeliest to fail, the cheapest."""
    reaching = [item for item, known in baseline.items() if _reaches(mutation, known.reached)]
    killers = sorted((item for item in reaching if kills[item]), key=lambda item: -kills[item] / _cost(baseline[item]))
    few = sorted(of_each(reaching, OF_EACH), key=lambda item: baseline[item].seconds)
    rest = sorted(reaching, key=lambda item: baseline[item].seconds)
    before = [item for item in reaching if item == killer]
    return list(dict.fromkeys([*before, *killers[:FIRST], *few, *rest]))


def sampled(items: Sequence[str], most: int) -> list[str]:
    """Of the items in their order, those that come first in any case and at most so many of each check."""
    kept = {*items[:FIRST], *of_each(items, most)}
    return [item for item in items if item in kept]


def affordable(items: Sequence[str], baseline: Baseline, seconds: float) -> list[str]:
    """Of the items in their order, each that together with those before it takes no more than so many seconds."""
    kept, spent = [], 0.0
    for item in items:
        if spent + baseline[item].seconds <= seconds:
            kept.append(item)
            spent += baseline[item].seconds
    return kept


def of_each(items: Iterable[str], most: int) -> list[str]:
    """At most so many of the items of each check."""
    by_check: dict[str, list[str]] = {}
    for item in items:
        by_check.setdefault(item.partition("[")[0], []).append(item)
    return [item for of_one in by_check.values() for item in spread(of_one, most)]


def _reaches(mutation: Mutation, reached: frozenset[tuple[str, int]]) -> bool:
    return mutation.statement is None or (mutation.module, mutation.statement) in reached


def _cost(known: Known) -> float:
    """Seconds; whatever an item does, coming to it takes some."""
    return known.seconds + 0.02
