"""A benchmark's switch: accept drafts by a stated profile instead of by what the target says.

With random weights no draft is ever right, so the cost of a tree could not be measured on a model whose weights are not
at hand. Forced acceptance makes the loop do all its work at a stated accepted length: the text means nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmark.batch import ForwardBatch, Tree
from draftmark.errors import RequestError

from .sampling import uniform


class ForcedAcceptance:
    """Rewrites the target's choices so that the walk keeps a drawn number of drafts.

    Args:
        profile: profile[i] is the probability that a path which kept i drafts keeps another one; none beyond its end.
        seed: of the draw, which is a function of (seed, request, position) as a sample is.

    Raises:
        RequestError: a profile that is no list of probabilities.
    """

    def __init__(self, profile: Sequence[float], seed: int, device: torch.device) -> None:
        if not all(0 <= share <= 1 for share in profile):
            raise RequestError(f"forced_acceptance is {tuple(profile)}, but each entry is a probability in [0, 1]")
        reach = torch.tensor(profile, dtype=torch.float64).cumprod(0)
        self._reach, self._seed = reach.to(device), seed

    def rewrite(
        self,
        batch: ForwardBatch,
        requests: torch.Tensor,
        drafts: torch.Tensor,
        parents: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """The target token of every node: its first child's above the drawn depth, its own from there on. Capturable.

        Args:
            batch: whose tail these trees are; ``[R, D]`` each, as in `draftmark.tree.verify_tree`.
            requests: int64 ``[R]``, request ids.

        Returns:
            int64 ``[R, D]``. A path ends early where the tree does.
        """
        size, nodes = drafts.shape
        depth = batch.tail.depth if isinstance(batch.tail, Tree) else torch.arange(nodes, device=drafts.device)
        draw = uniform(self._seed, requests, batch.positions.view(size, nodes)[:, 0])
        goal = (draw[:, None] < self._reach).sum(1, keepdim=True)
        node = torch.arange(nodes, device=drafts.device)
        child = (parents[:, None, :] == node[:, None]) & (drafts >= 0)[:, None, :]
        first = drafts.gather(1, child.int().argmax(2))
        return torch.where((depth < goal) & child.any(2), first, targets)
