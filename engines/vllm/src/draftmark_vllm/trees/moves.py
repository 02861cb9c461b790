"""Moves of KV: accepted nodes of a tree move to the slots that a chain of drafts would have used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


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
