"""Forced acceptance: accepts drafts by a given profile instead of the target's tokens.

A model with random weights never accepts a draft, so its cost at an accepted length could not be measured. Forced
acceptance makes the loop do all its work at a given accepted length. The text is then meaningless.

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
from draftmark_speculative.drafting import Drafting
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder
from draftmark_speculative.sampling import uniform

Shares = Sequence[Sequence[Sequence[float]]]
"""Acceptance probability by level, confidence class and rank."""


class ForcedAcceptance:
    """A backend's `TreeOps` with a random number of accepted drafts. It can be captured if that `TreeOps` can.

    Args:
        profile: profile[i] is the probability that a path with i accepted drafts accepts another; 0 after its end.
        seed: seed of the draw, which is a function of (seed, batch entry, round).

    Raises:
        RequestError: an entry of the profile is not a probability.
    """

    def __init__(self, ops: TreeOps, profile: Sequence[float], seed: int, device: torch.device) -> None:
        if not all(0 <= share <= 1 for share in profile):
            raise RequestError(f"the profile is {tuple(profile)}, but each entry is a probability; stay within [0, 1]")
        self._ops, self._seed = ops, seed
        self._reach = torch.tensor(profile, dtype=torch.float64).cumprod(0).to(device)
        self._rounds = torch.zeros(1, dtype=torch.int64, device=device)
        self._tail: Tail | None = None

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Call the backend's `write_tail`, and keep the batch's tree (mask, depths) for the next `verify_tree`."""
        self._tail = batch.tail
        self._ops.write_tail(batch, parents)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify with changed targets: above the drawn depth, a node's target is its first child.

        Deeper nodes keep the model's targets. A path ends early if the tree does.
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
        """Compact as the backend does."""
        self._ops.compact(pool, batch, accepted)


ROUNDS = 1024
"""Rounds after which draws repeat. They are drawn in advance, because hashing in a graph took 0.5 ms per round."""


class RankedAcceptance(ForcedAcceptance):
    """Forced acceptance by a child's rank among its siblings, so that pruning a child lowers the acceptance.

    `ForcedAcceptance` accepts some child whenever there is one, so one branch would be as good as four. Real heads are
    sure of some drafts and unsure of others, and a scheduler uses that difference. So each (request, round, level)
    draws one of Q equally likely confidence classes, and each class has its own shares.

    Args:
        shares: shares[i][q][k] is the probability that a path with i accepted drafts accepts the child of rank k in
            class q, in the order of the drafts.
        max_reqs: largest number of batch entries.
    """

    def __init__(self, ops: TreeOps, shares: Shares, seed: int, device: torch.device, max_reqs: int) -> None:
        super().__init__(ops, [1.0] * len(shares), seed, device)
        claimed = torch.tensor(shares, dtype=torch.float64, device=device)
        self._levels, self._classes, self._ranks = claimed.shape
        self._size = (ROUNDS, max_reqs, self._levels)
        self._claims = self._by_class(claimed).float()
        self._wanted = torch.zeros(self._size, dtype=torch.int64, device=device)
        self.force(shares)

    def force(self, shares: Shares) -> None:
        """Replace the acceptance probabilities (`shares`), also in captured graphs. `claims` keeps the first ones."""
        until = torch.tensor(shares, dtype=torch.float64, device=self._wanted.device).cumsum(2)
        self._wanted.copy_((self._draws(0)[..., None] >= self._by_class(until)).sum(3))

    def claims(self, levels: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Return the probabilities that a head with the first shares would give to the nodes of the next round.

        Can be captured.

        Args:
            levels: int64 ``[R, D]``, generations below the root.
            parents: int64 ``[R, D]``, also of unused rows; earlier siblings are likelier.

        Returns:
            float32 ``[R, D]``, the probability of each node if its parent is accepted.
        """
        rank = _ranks(parents, torch.ones_like(parents, dtype=torch.bool)).clamp(max=self._ranks - 1)
        claims = self._claims.index_select(0, (self._rounds + 1) % ROUNDS)[0, : len(parents)]
        return claims.flatten(1).gather(1, (levels - 1).clamp(0, self._levels - 1) * self._ranks + rank)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify with the drawn child as each node's target, if that child exists; a tree of one node is unchanged."""
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

    def _by_class(self, shares: torch.Tensor) -> torch.Tensor:
        """Return acceptance probabilities of each entry's confidence class: ``[ROUNDS, max_reqs, levels, ranks]``."""
        drawn = (self._draws(1) * self._classes).long().clamp(max=self._classes - 1)
        return shares[torch.arange(self._levels, device=drawn.device), drawn]

    def _draws(self, of: int) -> torch.Tensor:
        """Return pseudo-random numbers in [0, 1), a function of (seed, round, batch entry, tree level)."""
        rounds, entries, levels = (torch.arange(n, device=self._rounds.device) for n in self._size)
        place = rounds[:, None, None] * self._levels + levels
        return uniform(2 * self._seed + of, entries[:, None].expand(self._size), place.expand(self._size))


def _ranks(parents: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[R, D]``, the number of used siblings before each node; 0 for the root."""
    node = torch.arange(parents.shape[1], device=parents.device)
    siblings = (parents[:, :, None] == parents[:, None, :]) & used[:, None, :] & (node[:, None] > node)
    siblings[:, :, 0].zero_()
    return siblings.sum(2)


@dataclass(frozen=True)
class Claiming(Adaptive):
    """`Adaptive` for a random head: drafts get the probabilities with which forced acceptance accepts them.

    Attributes:
        forced: list to which `Engine(wrap_tree_ops=…)` adds the acceptance before drafting begins.
    """

    forced: list[RankedAcceptance] = field(default_factory=list)

    def drafting(self, *args: Any) -> Drafting:
        """Return the head's drafter, changed to use the probabilities of the forced acceptance."""
        return ClaimingDrafter(self, *args, self.costs, self.probe_share)


class ClaimingDrafter(AdaptiveHeadDrafter):
    """`AdaptiveHeadDrafter` that replaces the head's probabilities by those of the forced acceptance."""

    def _plant(self, size: int, growth: DraftTreeBuilder) -> None:
        super()._plant(size, growth)
        adaptive, chances = self._speculation, self._candidates.chances[:size]
        assert isinstance(adaptive, Claiming), "Claiming makes this drafter"
        claims = adaptive.forced[0].claims(self._candidates.levels[:size], self._state.parents[:size])
        chances.copy_(torch.where(chances > 0, claims, 0))
