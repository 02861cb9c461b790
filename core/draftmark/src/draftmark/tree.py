"""Draft trees on the device: from parents to the packed tail mask, the depths and the positions.

Plain torch, and what `draftmark.tree_ops.TreeOps` means: a backend's kernels give the same bits.
"""

from __future__ import annotations

import torch

from .batch import ForwardBatch, Tree
from .geometry import Geometry


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes each node descends from, itself included.

    Args:
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root, or for every root of a forest.

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
    """int32 ``[R, D]``: generations between each node and its root."""
    return reach.sum(-1, dtype=torch.int32) - 1


def pack_bits(bits: torch.Tensor, words: int) -> torch.Tensor:
    """bool ``[rows, T]`` → int32 ``[rows, words]``; bit j goes to word j // 32, bit j % 32; the rest is zero."""
    rows, slots = bits.shape
    padded = torch.nn.functional.pad(bits, (0, words * 32 - slots)).view(rows, words, 32)
    shift = torch.arange(32, device=bits.device)
    return (padded.long() << shift).sum(-1).to(torch.int32)


def write_tail(batch: ForwardBatch, geometry: Geometry, parents: torch.Tensor | None = None) -> None:
    """Fill a uniform batch's tail (mask and depth of a `Tree`) and its positions. Capturable.

    Args:
        batch: its prefix_lens are filled already.
        parents: int64 ``[R, T]`` tail slots, as for `ancestors`; needed for a `Tree`. In DRAFT the rows are the last
            topk slots, and a slot whose parent is committed has parent -1 and depth 0.
    """
    tail_len, q_len = batch.tail_lens[0], batch.q_lens[0]
    rows = slice(tail_len - q_len, tail_len)
    depth = torch.arange(tail_len, dtype=torch.int32, device=batch.device).expand(batch.padded_reqs, -1)
    if isinstance(batch.tail, Tree):
        assert parents is not None, "a tree's tail is written from its parents"
        reach = ancestors(parents)
        depth = depths(reach)
        batch.tail.mask.copy_(pack_bits(reach[:, rows].flatten(0, 1), geometry.mask_words))
        batch.tail.depth.copy_(depth)
    positions = batch.prefix_lens[:, None] + depth[:, rows]
    batch.positions.copy_(positions.clamp(max=geometry.limits.max_context_len - 1).view(-1))
