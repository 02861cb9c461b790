"""Acceptance of drafts: follows the target's tokens through each request's tree, by draftmark's own walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmark.runtime import VerifyResult, verify_tree

from .step_trees import Parents, chain


@dataclass(frozen=True)
class Kept:
    """Holds the accepted tokens and nodes of one step.

    Attributes:
        tokens: int32 ``[R, most nodes]``, the tokens to emit, then -1, as vLLM's own sampler returns them.
        paths: accepted nodes of each request, root first; one for each emitted token.
        result: the same on the device, as `commit_round` takes it.
    """

    tokens: torch.Tensor
    paths: list[list[int]]
    result: VerifyResult


def walk(drafts: Sequence[Sequence[int]], parents: Sequence[Parents | None], targets: torch.Tensor) -> Kept:
    """Follow the target's tokens through every request's tree, and return the accepted tokens and nodes.

    Args:
        drafts: draft tokens of each request, without its root.
        parents: parents of each request's nodes, root included; None for a chain.
        targets: int64 ``[rows]``, the target's token after each node, request by request.
    """
    counts = [1 + len(one) for one in drafts]
    widest = max(counts, default=1)
    tokens = [[-1, *one, *([-1] * (widest - 1 - len(one)))] for one in drafts]
    shapes = [chain(n) if one is None else one for n, one in zip(counts, parents, strict=True)]
    padded = [[*one, *([0] * (widest - len(one)))] for one in shapes]
    by_node = targets.new_zeros(len(counts), widest)
    owner = torch.arange(widest) < torch.tensor(counts)[:, None]
    by_node[owner.to(targets.device)] = targets
    found = verify_tree(
        torch.tensor(tokens, device=targets.device), torch.tensor(padded, device=targets.device), by_node
    )
    lens, index = found.accept_lens.tolist(), found.accept_index.tolist()
    return Kept(found.tokens.int(), [one[:n] for one, n in zip(index, lens, strict=True)], found)
