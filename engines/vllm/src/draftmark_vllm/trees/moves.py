"""Moves of KV: accepted nodes of a tree move to the slots that a chain of drafts would have used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from draftmark.runtime import VerifyResult


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
