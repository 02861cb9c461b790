"""Draft trees on the device: from parents to the packed tail mask and the depths."""

from __future__ import annotations

import torch


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes each node descends from, itself included.

    Args:
        parents: int64 ``[R, D]``, parents[r, j] < j; the root's entry is -1.

    Returns:
        bool ``[R, D, D]``; [r, j, i] is set when i is j or an ancestor of j.
    """
    nodes = parents.shape[1]
    node = torch.arange(nodes, device=parents.device)
    reach = (parents[:, :, None] == node) | (node[:, None] == node)
    # Reach of 2^n generations after n squarings: the depth is at most D - 1.
    for _ in range((nodes - 1).bit_length()):
        reach = torch.matmul(reach.float(), reach.float()) > 0
    return reach


def depths(reach: torch.Tensor) -> torch.Tensor:
    """int32 ``[R, D]``: generations between each node and the root."""
    return reach.sum(-1, dtype=torch.int32) - 1


def pack_bits(bits: torch.Tensor, words: int) -> torch.Tensor:
    """bool ``[rows, T]`` → int32 ``[rows, words]``; bit j goes to word j // 32, bit j % 32; the rest is zero."""
    rows, slots = bits.shape
    padded = torch.nn.functional.pad(bits, (0, words * 32 - slots)).view(rows, words, 32)
    shift = torch.arange(32, device=bits.device)
    return (padded.long() << shift).sum(-1).to(torch.int32)
