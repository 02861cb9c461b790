"""How a draft tree grows: beams that change parents, and the best nodes of all that were tried. Device only.

The first level has k candidates, every later one k² (k best tokens behind each of k beams), so that S levels try
``k + (S-1)·k²`` nodes (EAGLE-2, Li et al. 2024). The verified tree is the D - 1 of them with the highest cumulative
probability. A parent is at least as probable as its child and comes earlier, so under a stable sort the chosen nodes
are closed under parents, and parents stand before children.
"""

from __future__ import annotations

import torch

CHUNK = 256
"""Entries of the vocabulary that one block of a GPU looks through where rows are few."""
FEW_ROWS = 64
"""With this many rows one block a row fills a GPU."""


class DraftTreeBuilder:
    """One round's candidates, for R requests. Capturable: every shape is fixed by (R, k, step).

    Attributes:
        tokens: int64 ``[R, k]``, the token of each beam, to be run in the next draft step.
        parents: int64 ``[R, k]``, the beam of the previous step that each beam continues.
        slots: int64 ``[R, k·steps]``, the parent slot of every tail slot that beams were placed in; -1 where it is
            the root, which is committed.
    """

    def __init__(self, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """
        Args:
            scores: float32 ``[R, k]``, log-probability of each first token; at most 0.
            tokens: int64 ``[R, k]``.
        """
        requests, self.topk = tokens.shape
        self.tokens = tokens
        self.parents = torch.zeros_like(tokens)
        self.slots = tokens[:, :0]
        self._scores = scores
        # Which candidate each beam is: the index of a node's parent among all candidates, -1 for the root.
        self._beams = torch.arange(self.topk, device=tokens.device).expand(requests, -1)
        self._found = [(scores, tokens, torch.full_like(tokens, -1))]

    def place(self) -> torch.Tensor:
        """Put the beams into the next k tail slots; returns `slots`.

        Beam b of step i holds slot ``k·i + b``. Its parent is the slot of the beam that it continues, whatever that
        one's branch index: beams change parents from step to step.
        """
        placed, k = self.slots.shape[1], self.topk
        parents = self.parents + (placed - k) if placed else torch.full_like(self.tokens, -1)
        self.slots = torch.cat((self.slots, parents), 1)
        return self.slots

    def extend(self, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take the k best tokens behind each beam, and make the k best of all k² the next beams.

        Args:
            scores: float32 ``[R, k, k]``, log-probability of each token behind each beam; at most 0.
            tokens: int64 ``[R, k, k]``.
        """
        k, first = self.topk, sum(found[1].shape[1] for found in self._found)
        total = (self._scores[:, :, None] + scores).flatten(1)
        self._found.append((total, tokens.flatten(1), self._beams.repeat_interleave(k, 1)))
        self._scores, best = total.topk(k, 1)
        self.tokens = tokens.flatten(1).gather(1, best)
        self.parents = best // k
        self._beams = first + best

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` most probable nodes, or all where there are fewer, as a tree below the root.

        Returns:
            tokens and parents, int64 ``[R, count]``; node i of a tree is entry i - 1, node 0 is the root.
        """
        return self.best_with_chances(count)[:2]

    def best_with_chances(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `best` returns, and how likely each node is once its parent is kept, and its level.

        Returns:
            tokens, parents; float32 ``[R, count]`` in [0, 1], by the draft model; int64 ``[R, count]``, 1 for children
            of the root.
        """
        scores, tokens, parents = (torch.cat(column, 1) for column in zip(*self._found, strict=True))
        level = torch.cat([torch.full_like(found[1][0], i + 1) for i, found in enumerate(self._found)])
        order = scores.sort(dim=1, descending=True, stable=True).indices
        node = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
        rank = torch.zeros_like(order).scatter_(1, order, node)
        chosen = order[:, :count]
        parent = parents.gather(1, chosen)
        above = torch.where(parent < 0, 0.0, scores.gather(1, parent.clamp(min=0)))
        chances = (scores.gather(1, chosen) - above).exp().nan_to_num(nan=0.0)
        parent = torch.where(parent < 0, 0, rank.gather(1, parent.clamp(min=0)))
        return tokens.gather(1, chosen), parent, chances, level[chosen]


def best_tokens(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` most probable entries of each row.

    A head may say NaN; a draft is still only a guess, so such scores become -inf and the tree stays one.

    Args:
        logits: ``[rows, vocab]``.

    Returns:
        log-probabilities float32 ``[rows, topk]``, at most 0, and indices int64 ``[rows, topk]``.
    """
    indices = _largest(logits, topk)
    scores = logits.log_softmax(-1, dtype=torch.float32).gather(1, indices)
    return scores.nan_to_num(nan=float("-inf")).clamp(max=0), indices


def _largest(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """Indices of each row's `topk` largest entries, int64, in any order.

    A GPU gives each row of a topk to one block, which passes over it a dozen times. So for few rows the best of every
    chunk are found side by side first, then the best of those.
    """
    rows, width = logits.shape
    if rows >= FEW_ROWS or width % CHUNK or topk > CHUNK or width <= CHUNK:
        return logits.topk(topk, -1, sorted=False).indices
    values, indices = logits.view(rows, -1, CHUNK).topk(topk, -1, sorted=False)
    indices += torch.arange(0, width, CHUNK, device=logits.device)[:, None]
    best = values.flatten(1).topk(topk, -1, sorted=False).indices
    return indices.flatten(1).gather(1, best)
