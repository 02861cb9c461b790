"""How often drafts of the host come true, by what they were guessed from: a prior learnt online. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..drafts import DraftTree

KEPT = 0.98
"""What remains of the evidence behind each time that a class of drafts is tried."""
FIRST = 0.5
"""Chance of a draft of a class that was never tried."""
PRIOR = 2.0
"""Drafts tried for which a class is taken for the one that it specialises, and a request for all requests."""
DEEPEST = 4
"""Levels that are told apart; a draft that has come so far mostly goes on."""


class Grounds:
    """Chances of drafts by ground (the tokens that matched) and level, and by request.

    A sibling that is not the first of its parent's children counts as its own class: it is the second guess.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int, bool], tuple[float, float]] = {}
        self._requests: dict[int, tuple[float, float]] = {}

    def chances(self, request: int, tree: DraftTree) -> list[float]:
        """The chance of each node once its parent is kept; 1 for the root. Children of a node sum to at most 1."""
        expected, came = self._requests.get(request, (0.0, 0.0))
        ratio = (came + PRIOR) / (expected + PRIOR)
        found = [1.0] + [min(1.0, ratio * self._chance(one)) for one in _classes(tree)[1:]]
        total = [0.0] * len(tree)
        for node in range(1, len(tree)):
            total[tree.parents[node]] += found[node]
        return [1.0] + [found[n] / max(1.0, total[tree.parents[n]]) for n in range(1, len(tree))]

    def learn(self, request: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Take note of a verified tree.

        Args:
            tokens: what the round gave: the target's tokens along the kept path, and the one behind it.

        Drafts below the kept path were perhaps not admitted. They count as tried where their parent was kept, which is
        what a chance means; so a class whose drafts are never admitted looks worse than it is until it is probed.
        """
        classes, node = _classes(tree), 0
        expected, came = self._requests.get(request, (0.0, 0.0))
        for token in tokens:
            children = [n for n in range(node + 1, len(tree)) if tree.parents[n] == node]
            if not children:
                break
            kept = next((n for n in children if tree.tokens[n] == token), None)
            expected = KEPT * expected + min(1.0, sum(self._chance(classes[n]) for n in children))
            came = KEPT * came + (kept is not None)
            for n in children:
                tried, right = self._classes.get(classes[n], (0.0, 0.0))
                self._classes[classes[n]] = KEPT * tried + 1, KEPT * right + (n == kept)
            if kept is None:
                break
            node = kept
        self._requests[request] = expected, came

    def only(self, requests: Iterable[int]) -> None:
        """Forget requests but these."""
        running = set(requests)
        self._requests = {one: seen for one, seen in self._requests.items() if one in running}

    def _chance(self, one: tuple[int, int, bool]) -> float:
        tried, right = self._classes.get(one, (0.0, 0.0))
        return (right + PRIOR * FIRST) / (tried + PRIOR)


def _classes(tree: DraftTree) -> list[tuple[int, int, bool]]:
    """Ground, level, and whether an earlier sibling exists, of each node."""
    levels, seen, found = [0], set[int](), [(0, 0, False)]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        levels.append(levels[parent] + 1)
        ground = tree.grounds[node] if node < len(tree.grounds) else 0
        found.append((ground, min(levels[node], DEEPEST), parent in seen))
        seen.add(parent)
    return found
