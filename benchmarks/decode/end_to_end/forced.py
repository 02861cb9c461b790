"""Accept drafts by a stated profile instead of by what the target says.

With random weights no draft is ever right, so the cost of a tree could not be measured on a model whose weights are not
at hand. Forced acceptance makes the loop do all its work at a stated accepted length. The text means nothing then.

    Engine(model, config, wrap_tree_ops=lambda ops: ForcedAcceptance(ops, (0.8, 0.7), seed=0, device=model.device))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftmark import RequestError
from draftmark.runtime import ForwardBatch, KVPool, Tail, Tree, TreeOps, VerifyResult
from draftmark_speculative import Adaptive
from draftmark_speculative.adaptive.head import AdaptiveHeadDrafter
from draftmark_speculative.drafts import Drafting
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder
from draftmark_speculative.sampling import uniform

Shares = Sequence[Sequence[Sequence[float]]]
"""By level, mood and rank."""


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


ROUNDS = 1024
"""Rounds behind which draws repeat. They are made before: hashing in a graph took half a millisecond of each round."""


class RankedAcceptance(ForcedAcceptance):
    """Forced acceptance by a child's rank among its siblings: a tree that is cut loses what cut children give.

    `ForcedAcceptance` keeps some child as long as there is one, so one branch would be as good as four. Real drafts
    differ: of some the head is sure, of others not, and a scheduler lives on the difference. So each (request, round,
    level) draws one of Q equally likely *moods*, and the mood has the shares.

    Args:
        shares: shares[i][q][k] is the probability that of a path which kept i drafts the child of rank k is kept in
            mood q, by the drafts' own order; none beyond.
        max_reqs: batch entries at most.
    """

    def __init__(self, ops: TreeOps, shares: Shares, seed: int, device: torch.device, max_reqs: int) -> None:
        super().__init__(ops, [1.0] * len(shares), seed, device)
        claimed = torch.tensor(shares, dtype=torch.float64, device=device)
        self._levels, self._moods, self._ranks = claimed.shape
        self._size = (ROUNDS, max_reqs, self._levels)
        self._claims = self._of_moods(claimed).float()
        self._wanted = torch.zeros(self._size, dtype=torch.int64, device=device)
        self.force(shares)

    def force(self, shares: Shares) -> None:
        """Other shares from now on, in captured graphs too, of the same form; what drafts claim stays."""
        until = torch.tensor(shares, dtype=torch.float64, device=self._wanted.device).cumsum(2)
        self._wanted.copy_((self._draws(0)[..., None] >= self._of_moods(until)).sum(3))

    def claims(self, levels: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """What a head whose shares are the first ones would say of the nodes of the round to come. Capturable.

        Args:
            levels: int64 ``[R, D]``, generations below the root.
            parents: int64 ``[R, D]``, of unused rows too; earlier siblings are likelier ones.

        Returns:
            float32 ``[R, D]``, the chance of each node once its parent is kept.
        """
        rank = _ranks(parents, torch.ones_like(parents, dtype=torch.bool)).clamp(max=self._ranks - 1)
        claims = self._claims.index_select(0, (self._rounds + 1) % ROUNDS)[0, : len(parents)]
        return claims.flatten(1).gather(1, (levels - 1).clamp(0, self._levels - 1) * self._ranks + rank)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify against the child whose rank was drawn, where it is there; a lone root is the target's."""
        size, nodes = drafts.shape
        if nodes == 1:
            return self._ops.verify_tree(drafts, parents, targets)
        node = torch.arange(nodes, device=drafts.device)
        depth = self._depth(node).expand(size, -1).long()
        self._rounds.add_(1)
        wanted = self._wanted.index_select(0, self._rounds % ROUNDS)[0, :size]
        wanted = torch.where(depth < self._levels, wanted.gather(1, depth.clamp(max=self._levels - 1)), self._ranks)
        used = drafts >= 0
        used[:, 0].zero_()
        chosen = used & (_ranks(parents, used) == wanted.gather(1, parents.clamp(min=0)))
        child = (parents[:, None, :] == node[:, None]) & chosen[:, None, :]
        kept = drafts.gather(1, child.int().argmax(2))
        return self._ops.verify_tree(drafts, parents, torch.where(child.any(2), kept, targets))

    def _of_moods(self, shares: torch.Tensor) -> torch.Tensor:
        """``[ROUNDS, max_reqs, levels, ranks]``: of each level its mood's."""
        mood = (self._draws(1) * self._moods).long().clamp(max=self._moods - 1)
        return shares[torch.arange(self._levels, device=mood.device), mood]

    def _draws(self, of: int) -> torch.Tensor:
        """Numbers in [0, 1) by (seed, round, entry, level)."""
        rounds, entries, levels = (torch.arange(n, device=self._rounds.device) for n in self._size)
        place = rounds[:, None, None] * self._levels + levels
        return uniform(2 * self._seed + of, entries[:, None].expand(self._size), place.expand(self._size))


def _ranks(parents: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """int64 ``[R, D]``, how many used siblings stand before each node; the root is nobody's."""
    node = torch.arange(parents.shape[1], device=parents.device)
    siblings = (parents[:, :, None] == parents[:, None, :]) & used[:, None, :] & (node[:, None] > node)
    siblings[:, :, 0].zero_()
    return siblings.sum(2)


@dataclass(frozen=True)
class Claiming(Adaptive):
    """`Adaptive` whose head claims what forced acceptance keeps: the probabilities of a random head mean nothing.

    Attributes:
        forced: where `Engine(wrap_tree_ops=…)` puts the acceptance before drafting begins.
    """

    forced: list[RankedAcceptance] = field(default_factory=list)

    def drafting(self, *args: Any) -> Drafting:
        """The head's drafter, with the claims in place of the head's probabilities."""
        return ClaimingDrafter(self, *args)


class ClaimingDrafter(AdaptiveHeadDrafter):
    """Chances by the acceptance's claims; all else is the drafter's own."""

    def _plant(self, size: int, growth: DraftTreeBuilder) -> None:
        super()._plant(size, growth)
        adaptive, chances = self._adaptive, self._candidates.chances[:size]
        assert isinstance(adaptive, Claiming), "Claiming makes this drafter"
        claims = adaptive.forced[0].claims(self._candidates.levels[:size], self._state.parents[:size])
        chances.copy_(torch.where(chances > 0, claims, 0))
