"""Draws a fixed random subset of the mutants, with an equal number from each file."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from .mutation import Mutation

SEED = 20


def drawn(every: Sequence[Mutation], number: int, seed: int = SEED) -> list[Mutation]:
    """Draw `number` mutants, evenly over the files, and return them in their original order.

    A file with fewer mutants than its share gives all of them, and other files give more. With one seed, a larger
    draw contains every smaller one.
    """
    kept = {one.id for one in _turn_by_turn(every, number, seed)}
    return [one for one in every if one.id in kept]


def _turn_by_turn(every: Sequence[Mutation], number: int, seed: int) -> Iterable[Mutation]:
    queues = []
    for module in dict.fromkeys(one.module for one in every):
        queue = sorted((one for one in every if one.module == module), key=lambda one: one.id)
        random.Random(f"{seed} {module}").shuffle(queue)
        queues.append(queue)
    found: list[Mutation] = []
    while any(queues) and len(found) < number:
        found += [queue.pop(0) for queue in queues if queue]
    return found[:number]
