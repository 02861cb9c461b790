"""The verdict on a draft tree: one target token a row, then the walk that keeps the path which agrees.

Lossless by construction: the token that follows each kept node is the target's own (its argmax, or a sample
from its distribution), whether or not a draft guessed it. A draft only decides how many such tokens one forward
yields. For drafts that are guesses rather than samples this equals rejection sampling with a point-mass proposal
(Leviathan et al. 2023): a guess x is kept with probability p(x).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """What one verification yields, per request.

    Attributes:
        tokens: int64 ``[R, D]``; the first counts[r] are the tokens to emit, the rest -1.
        counts: int64 ``[R]``; kept nodes, root included = tokens emitted = KV tokens committed.
        path: int64 ``[R, D]``; tail slot of the i-th kept node, and i itself beyond counts[r]. Kept slots ascend from
            0, the root, so path[r, i] >= i.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    path: torch.Tensor


def walk(drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> Verdict:
    """Follow the target's choices from the root for as long as a child carries them. Capturable.

    Args:
        drafts: int64 ``[R, D]``, the token of each node; -1 for an unused row, which nothing matches.
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root.
        targets: int64 ``[R, D]``, the target's token after each node, >= 0.

    Where several children carry the target's token, the first is kept.
    """
    requests, nodes = drafts.shape
    node = torch.zeros(requests, 1, dtype=torch.int64, device=drafts.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    path, kept = [node], [alive]
    for depth in range(1, nodes):
        child = (parents == node) & (drafts == targets.gather(1, node)) & alive
        alive = child.any(1, keepdim=True)
        node = torch.where(alive, child.int().argmax(1, keepdim=True), node)
        path.append(torch.where(alive, node, depth))
        kept.append(alive)
    steps, live = torch.cat(path, 1), torch.cat(kept, 1)
    return Verdict(torch.where(live, targets.gather(1, steps), -1), live.sum(1), steps)
