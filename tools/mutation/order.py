"""Order of the items that run on a mutant: items that killed mutants, then some of every check, then the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from draftmark_contract.check import spread

from .baseline import Baseline, Known
from .mutation import Mutation

FIRST, OF_EACH = 30, 2
"""Number of items with the most kills per second, and number of items of each check, that run first."""


def order(mutation: Mutation, baseline: Baseline, kills: Counter[str], killer: str | None = None) -> list[str]:
    """Return the items that reach the mutant's statement: first its earlier `killer`, then items with many kills."""
    reaching = [item for item, known in baseline.items() if _reaches(mutation, known.reached)]
    killers = sorted((item for item in reaching if kills[item]), key=lambda item: -kills[item] / _cost(baseline[item]))
    few = sorted(of_each(reaching, OF_EACH), key=lambda item: baseline[item].seconds)
    rest = sorted(reaching, key=lambda item: baseline[item].seconds)
    before = [item for item in reaching if item == killer]
    return list(dict.fromkeys([*before, *killers[:FIRST], *few, *rest]))


def sampled(items: Sequence[str], most: int) -> list[str]:
    """Return the first `FIRST` items and at most `most` items of each check, in the given order."""
    kept = {*items[:FIRST], *of_each(items, most)}
    return [item for item in items if item in kept]


def affordable(items: Sequence[str], baseline: Baseline, seconds: float) -> list[str]:
    """Return the items, in the given order, that fit together into a CPU time in seconds."""
    kept, spent = [], 0.0
    for item in items:
        if spent + baseline[item].seconds <= seconds:
            kept.append(item)
            spent += baseline[item].seconds
    return kept


def of_each(items: Iterable[str], most: int) -> list[str]:
    """Return at most `most` items of each check; an item is one check on one case."""
    by_check: dict[str, list[str]] = {}
    for item in items:
        by_check.setdefault(item.partition("[")[0], []).append(item)
    return [item for of_one in by_check.values() for item in spread(of_one, most)]


def _reaches(mutation: Mutation, reached: frozenset[tuple[str, int]]) -> bool:
    return mutation.statement is None or (mutation.module, mutation.statement) in reached


def _cost(known: Known) -> float:
    """Return an item's CPU time in seconds, plus a fixed cost of starting it."""
    return known.seconds + 0.02
