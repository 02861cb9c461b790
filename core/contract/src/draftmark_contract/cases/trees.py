"""Draft trees, given as the parent of each new token (tail slot). Does not import torch."""

from __future__ import annotations

import random

from ..oracle.history import NO_PARENT, chain


def verify_tree(kind: str, rows: int, seed: int) -> tuple[int, ...]:
    """Return the parent of each slot of a verify tree with `rows` slots; slot 0 is the root.

    Args:
        kind: ``"chain"``, ``"star"`` (all on the root), ``"random"``, ``"deep"`` (two parallel chains), or
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
    """Return the slots that each slot sees: itself and random earlier slots, ancestors or not (lookahead, n-gram)."""
    dice = random.Random(f"masks {rows} {seed}")
    return tuple((*sorted(dice.sample(range(slot), dice.randrange(slot + 1))), slot) for slot in range(rows))


def beams(topk: int, step: int, seed: int) -> tuple[int, ...]:
    """Return the parent of each draft slot: topk slots per step, each with a random parent from the previous step.

    One branch can continue twice while another ends. The result for a later step extends that for an earlier step.
    """
    dice = random.Random(f"beams {topk} {seed}")
    parents = [NO_PARENT] * topk
    for depth in range(1, step + 1):
        parents += [(depth - 1) * topk + dice.randrange(topk) for _ in range(topk)]
    return tuple(parents)
