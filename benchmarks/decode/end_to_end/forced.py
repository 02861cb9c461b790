"""Accept drafts by a stated profile instead of by what the target says.

With random weights no draft is ever right, so the cost of a tree could not be measured on a model whose weights are not
at hand. Forced acceptance makes the loop do all its work at a stated accepted length. The text means nothing then.

    Engine(model, config, wrap_tree_ops=lambda ops: ForcedAcceptance(ops, (0.8, 0.7), seed=0, device=model.device))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmark import RequestError
from draftmark.runtime import ForwardBatch, KVPool, Tail, Tree, TreeOps, VerifyResult
from draftmark_speculative.sampling import uniform


class ForcedAcceptance:
    """A backend's `TreeOps`, but that verification keeps a drawn number of drafts. Capturable as they are.

    Args:
        profile: profile[i] is the probability that a path which kept i drafts keeps another one; none beyond its end.
        seed: of the draw, which is a function of (seed, batch entry, round).

    Raises:
        RequestError: a profile that is no list of probabilities.
    """

    def __init__(self, ops: TreeOps, profile: Sequence[float], seed: int, device: torch.device) -> None:
        if not all(0 <= share <= 1 for share in profile):
            raise RequestError(f"the profile is {tuple(profile)}, but each entry is a probability; stay within [0, 1]")
        self._ops, self._seed = ops, seed
        self._reach = torch.tensor(profile, dtype=torch.float64).cumprod(0).to(device)
        self._rounds = torch.zeros(1, dtype=torch.int64, device=device)
        self._tail: Tail | None = None

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """As the backend does; the tail is that of the trees to be verified next."""
        self._tail = batch.tail
        self._ops.write_tail(batch, parents)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify against targets that are each node's first child above the drawn depth, and the model's from there on.

        A path ends early where the tree does.
        """
        size, nodes = drafts.shape
        node = torch.arange(nodes, device=drafts.device)
        depth = self._depth(node)
        self._rounds.add_(1)
        draw = uniform(self._seed, torch.arange(size, device=drafts.device), self._rounds)
        goal = (draw[:, None] < self._reach).sum(1, keepdim=True)
        child = (parents[:, None, :] == node[:, None]) & (drafts >= 0)[:, None, :]
        first = drafts.gather(1, child.int().argmax(2))
        return self._ops.verify_tree(drafts, parents, torch.where((depth < goal) & child.any(2), first, targets))

    def _depth(self, nodes: torch.Tensor) -> torch.Tensor:
        return self._tail.depth if isinstance(self._tail, Tree) else nodes

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """As the backend does."""
        self._ops.compact(pool, batch, accepted)


class RankedAcceptance(ForcedAcceptance):
    """Forced acceptance by a child's rank among its siblings: a tree that is cut loses what cut children give.

    `ForcedAcceptance` keeps some child as long as there is one, so one branch would be as good as four.

    Args:
        shares: shares[i][k] is the probability that of a path which kept i drafts the child of rank k is kept, by the
            drafts' own order; none beyond.
    """

    def __init__(self, ops: TreeOps, shares: Sequence[Sequence[float]], seed: int, device: torch.device) -> None:
        super().__init__(ops, [min(1.0, sum(level)) for level in shares], seed, device)
        self._until = _cumulated(shares).to(device)

    def force(self, shares: Sequence[Sequence[float]]) -> None:
        """Other shares from now on, in captured graphs too; as many levels and ranks as before, or fewer."""
        self._until.zero_()
        fewer = _cumulated(shares)
        ranks, rest = fewer.shape[1], self._until.shape[1] - fewer.shape[1]
        self._until[: len(fewer)].copy_(torch.cat((fewer, fewer[:, ranks - 1 :].expand(-1, rest)), 1))

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify against the child whose rank was drawn, where it is there."""
        size, nodes = drafts.shape
        node, entry = torch.arange(nodes, device=drafts.device), torch.arange(size, device=drafts.device)
        levels, ranks = self._until.shape
        depth = self._depth(node).expand(size, -1).long()
        self._rounds.add_(1)
        draws = torch.stack([uniform(self._seed, entry, self._rounds * levels + level) for level in range(levels)], 1)
        wanted = (draws[:, :, None] >= self._until).sum(2)
        wanted = torch.where(depth < levels, wanted.gather(1, depth.clamp(max=levels - 1)), ranks)
        used = drafts >= 0
        used[:, 0].zero_()
        siblings = (parents[:, :, None] == parents[:, None, :]) & used[:, None, :] & (node[:, None] > node)
        chosen = used & (siblings.sum(2) == wanted.gather(1, parents.clamp(min=0)))
        child = (parents[:, None, :] == node[:, None]) & chosen[:, None, :]
        kept = drafts.gather(1, child.int().argmax(2))
        return self._ops.verify_tree(drafts, parents, torch.where(child.any(2), kept, targets))


def _cumulated(shares: Sequence[Sequence[float]]) -> torch.Tensor:
    """float64 ``[levels, ranks]``, the probability of a rank up to each; levels with fewer ranks stay at their sum."""
    ranks = max(map(len, shares))
    padded = [[*level, *[0.0] * (ranks - len(level))] for level in shares]
    return torch.tensor(padded, dtype=torch.float64).cumsum(1)
