"""Acceptance of drafts: walks the target's tokens through each request's tree, and moves the accepted KV.

Accepted nodes of a tree move to the slots that a chain of drafts would have used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class GroupPages(NamedTuple):
    """KV of the layers of one vLLM cache group.

    Attributes:
        pages: pages of each layer, as `move_kv` takes them.
        slots: int64 ``[rows]``, the KV slot of each row of the step.
    """

    pages: list[torch.Tensor]
    slots: torch.Tensor


class ChainMoves:
    """KV operations of one step for `commit_round`: each accepted node moves to its row in a chain.

    vLLM's scheduler counts the tokens and its block tables place them, so the round has no draftmark batch or lengths.

    Attributes:
        sources, targets: rows to move, and the rows that they move to.
    """

    def __init__(self, paths: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        self.sources, self.targets = moved_rows(paths, starts)

    def compact(self, pool: GroupPages, batch: None, accepted: VerifyResult) -> None:
        """Move the accepted KV of one group. The rows are known, so `batch` and `accepted` are not read."""
        move_kv(pool.pages, pool.slots, self.sources, self.targets)


def moved_rows(paths: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (source rows, target rows) of the KV to move. Node indices of a path ascend, so targets are lower rows."""
    sources, targets = [], []
    for path, first in zip(paths, starts, strict=False):
        for place, node in enumerate(path):
            if place != node:
                sources.append(first + node)
                targets.append(first + place)
    return sources, targets


def move_kv(pages: Iterable[torch.Tensor], slots: torch.Tensor, sources: list[int], targets: list[int]) -> None:
    """Copy KV of rows to other rows' slots, in every layer.

    Args:
        pages: pages of each layer, ``[pages, heads, page_size, head_dim]`` with any strides, as vLLM allocates them; of
            an MLA layer ``[pages, page_size, row]``.
        slots: int64 ``[rows]``, the KV slot of each row of the step.
        sources, targets: rows. Every source is read before any target is written.
    """
    if not sources:
        return
    old, new = (slots[torch.tensor(rows, device=slots.device)] for rows in (sources, targets))
    for layer in pages:
        by_token = layer if layer.dim() == 3 else layer.transpose(1, 2)
        size = by_token.shape[1]
        by_token[new // size, new % size] = by_token[old // size, old % size]
