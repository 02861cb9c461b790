"""Draft trees, as the parents of tail slots. No torch."""

from __future__ import annotations

import random

from ..oracle.history import NO_PARENT, chain


def verify_tree(kind: str, rows: int, seed: int) -> tuple[int, ...]:
    """Return the parents of a verify tail of `rows` slots; slot 0 is the root.

    Args:
        kind: ``"chain"``, ``"star"`` (all on the root), ``"random"``, ``"deep"`` (two chains next to each other), or
            ``"unused"``: a short chain, then unused rows that are children of the root and can never be accepted.
    """
    dice = random.Random(f"{kind} {rows} {seed}")
    if kind == "chain":
        return chain(rows)
    if kind == "star":
        return (NO_PARENT, *(0 for _ in range(rows - 1)))
    if kind == "deep":
        return (NO_PARENT, *(max(0, slot - 2) for slot in range(1, rows)))
    if kind == "unused":
        used = min(rows, 3)
        return (*chain(used), *(0 for _ in range(rows - used)))
    return (NO_PARENT, *(dice.randrange(slot) for slot in range(1, rows)))


def any_masks(rows: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the visible slots of each slot: itself and random earlier ones, ancestors or not (lookahead, n-gram)."""
    dice = random.Random(f"masks {rows} {seed}")
    return tuple((*sorted(dice.sample(range(slot), dice.randrange(slot + 1))), slot) for slot in range(rows))


def beams(topk: int, step: int, seed: int) -> tuple[int, ...]:
    """Return the parents of a draft tail: topk slots per step, each after any slot of the step before.

    Beams change parents: one branch may continue twice while another ends. A later step extends an earlier one.
    """
    dice = random.Random(f"beams {topk} {seed}")
    parents = [NO_PARENT] * topk
    for depth in range(1, step + 1):
        parents += [(depth - 1) * topk + dice.randrange(topk) for _ in range(topk)]
    return tuple(parents)
