"""Acceptance rates of host drafts by ground (class of evidence, such as matched tokens). Numbers only, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..drafts import DraftTree

KEPT = 0.98
"""Decay factor of a class's evidence, applied each time a draft of that class is tried."""
FIRST = 0.5
"""Chance of a draft in a class that was never tried."""
PRIOR = 2.0
"""Weight of the prior, in tried drafts: `FIRST` for a class, the rates of all requests for one request."""
DEEPEST = 4
"""Deepest level with classes of its own. Deeper drafts share them, because they mostly continue to match."""


class Grounds:
    """Learns the acceptance probability of drafts by ground (for n-grams, the matched tokens), depth and request.

    Nodes that are not their parent's first child form separate classes.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int, bool], tuple[float, float]] = {}
        self._requests: dict[int, tuple[float, float]] = {}

    def chances(self, request: int, tree: DraftTree) -> list[float]:
        """Return each node's acceptance probability once its parent is accepted; siblings sum to at most 1."""
        expected, came = self._requests.get(request, (0.0, 0.0))
        ratio = (came + PRIOR) / (expected + PRIOR)
        found = [1.0] + [min(1.0, ratio * self._chance(one)) for one in _classes(tree)[1:]]
        total = [0.0] * len(tree)
        for node in range(1, len(tree)):
            total[tree.parents[node]] += found[node]
        return [1.0] + [found[n] / max(1.0, total[tree.parents[n]]) for n in range(1, len(tree))]

    def learn(self, request: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Update the acceptance rates from a verified tree.

        Args:
            tokens: the round's tokens: the target's tokens along the kept path, and the token after the path.

        Children of a kept node count as tried, although they may not have been admitted. So a class without admitted
        drafts looks worse than it is until a probe tries it.
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
        """Drop the acceptance rates of all requests except `requests`."""
        running = set(requests)
        self._requests = {one: seen for one, seen in self._requests.items() if one in running}

    def _chance(self, one: tuple[int, int, bool]) -> float:
        tried, right = self._classes.get(one, (0.0, 0.0))
        return (right + PRIOR * FIRST) / (tried + PRIOR)


def _classes(tree: DraftTree) -> list[tuple[int, int, bool]]:
    """Return each node's class (ground, depth, True if the node has an earlier sibling)."""
    levels, seen, found = [0], set[int](), [(0, 0, False)]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        levels.append(levels[parent] + 1)
        ground = tree.grounds[node] if node < len(tree.grounds) else 0
        found.append((ground, min(levels[node], DEEPEST), parent in seen))
        seen.add(parent)
    return found
