"""Growth of a draft tree on the device: beams that change parents, and selection of the best nodes.

The first level has k candidates, and every later level k²: the k best tokens after each of k beams. So S levels try
``k + (S-1)·k²`` nodes (EAGLE-2, Li et al. 2024). The verified tree consists of the D - 1 nodes with the highest
cumulative probability. A parent is at least as probable as its child and comes earlier. So under a stable sort the
chosen nodes include their parents, and parents stand before children.
"""

from __future__ import annotations

import torch

CHUNK = 256
"""Vocabulary entries that one GPU block scans when there are few rows."""
FEW_ROWS = 64
"""Number of rows from which one block a row fills a GPU."""


class DraftTreeBuilder:
    """Builds the draft trees of R requests in one round. Capturable: (R, k, step) fix every shape.

    Attributes:
        tokens: int64 ``[R, k]``, token of each beam, the input of the next draft step.
        parents: int64 ``[R, k]``, beam of the previous step that each beam continues.
        slots: int64 ``[R, k·steps]``, parent slot of every tail slot with a beam; -1 if the parent is the root, which
            is committed.
    """

    def __init__(self, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """Start with the first level of a tree.

        Args:
            scores: float32 ``[R, k]``, log-probability of each first token; at most 0.
            tokens: int64 ``[R, k]``.
        """
        requests, self.topk = tokens.shape
        self.tokens = tokens
        self.parents = torch.zeros_like(tokens)
        self.slots = tokens[:, :0]
        self._scores = scores
        # Candidate index of each beam; a node's parent is an index into all candidates, -1 for the root.
        self._beams = torch.arange(self.topk, device=tokens.device).expand(requests, -1)
        self._found = [(scores, tokens, torch.full_like(tokens, -1))]

    def place(self) -> torch.Tensor:
        """Place the beams into the next k tail slots (KV slots of drafted rows); return `slots`.

        Beam b of step i gets slot ``k·i + b``. Its parent is the slot of the beam that it continues, which may have
        another index b: beams change parents from step to step.
        """
        placed, k = self.slots.shape[1], self.topk
        parents = self.parents + (placed - k) if placed else torch.full_like(self.tokens, -1)
        self.slots = torch.cat((self.slots, parents), 1)
        return self.slots

    def extend(self, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the k best tokens after each beam, and make the k best of these k² the next beams.

        Args:
            scores: float32 ``[R, k, k]``, log-probability of each token after each beam; at most 0.
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
        """Return the `count` most probable nodes, or all if there are fewer, as a tree below the root.

        Returns:
            tokens and parents, int64 ``[R, count]``; node i of a tree is entry i - 1, node 0 is the root.
        """
        return self.best_with_chances(count)[:2]

    def best_with_chances(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tree of `best`, with each node's probability once its parent is kept, and its level.

        Returns:
            tokens and parents as in `best`; chances float32 ``[R, count]`` in [0, 1], by the draft model; levels int64
            ``[R, count]``, 1 for children of the root.
        """
        scores, tokens, parents = (torch.cat(column, 1) for column in zip(*self._found, strict=True))
        level = torch.cat([torch.full_like(found[1][0], i + 1) for i, found in enumerate(self._found)])
        best, parent, chosen = best_nodes(scores, tokens, parents, count)
        above = parents.gather(1, chosen)
        before = torch.where(above < 0, 0.0, scores.gather(1, above.clamp(min=0)))
        chances = (scores.gather(1, chosen) - before).exp().nan_to_num(nan=0.0)
        return best, parent, chances, level[chosen]


def best_nodes(
    scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `count` best of n candidates as a tree below the root, or all if there are fewer.

    Args:
        scores: float32 ``[R, n]``, at most the score of the candidate's parent.
        tokens: int64 ``[R, n]``.
        parents: int64 ``[R, n]``, candidate of each parent, which comes first; -1 for the root.

    Returns:
        tokens and parents, int64 ``[R, count]``, where node i of the tree is entry i - 1, and node 0 is the root. Then
        the candidate of each node.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    node = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
    rank = torch.zeros_like(order).scatter_(1, order, node)
    chosen = order[:, :count]
    parent = parents.gather(1, chosen)
    return tokens.gather(1, chosen), torch.where(parent < 0, 0, rank.gather(1, parent.clamp(min=0))), chosen


def best_tokens(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `topk` most probable entries of each row.

    NaN scores become -inf: a draft may be wrong, but the parents must stay valid.

    Args:
        logits: ``[rows, vocab]``.

    Returns:
        log-probabilities float32 ``[rows, topk]``, at most 0, and indices int64 ``[rows, topk]``.
    """
    indices = _largest(logits, topk)
    scores = logits.log_softmax(-1, dtype=torch.float32).gather(1, indices)
    return scores.nan_to_num(nan=float("-inf")).clamp(max=0), indices


def _largest(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the indices of each row's `topk` largest entries, int64, in any order.

    torch's topk gives each row to one GPU block, which passes over it a dozen times. For few rows, the best entries of
    every chunk are found in parallel first, and then the best of those.
    """
    rows, width = logits.shape
    if rows >= FEW_ROWS or width % CHUNK or topk > CHUNK or width <= CHUNK:
        return logits.topk(topk, -1, sorted=False).indices
    values, indices = logits.view(rows, -1, CHUNK).topk(topk, -1, sorted=False)
    indices += torch.arange(0, width, CHUNK, device=logits.device)[:, None]
    best = values.flatten(1).topk(topk, -1, sorted=False).indices
    return indices.flatten(1).gather(1, best)
