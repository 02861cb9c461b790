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
        depth = self._tail.depth if isinstance(self._tail, Tree) else node
        self._rounds.add_(1)
        draw = uniform(self._seed, torch.arange(size, device=drafts.device), self._rounds)
        goal = (draw[:, None] < self._reach).sum(1, keepdim=True)
        child = (parents[:, None, :] == node[:, None]) & (drafts >= 0)[:, None, :]
        first = drafts.gather(1, child.int().argmax(2))
        return self._ops.verify_tree(drafts, parents, torch.where((depth < goal) & child.any(2), first, targets))

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """As the backend does."""
        self._ops.compact(pool, batch, accepted)
