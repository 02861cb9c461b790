"""Rotary positions in Llama's layout, for queries and keys that lie side by side."""

from __future__ import annotations

import torch


def rotated(
    heads: torch.Tensor, num_q: int, num_k: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x · cos + (second half, first half) · sin`` of queries and keys, in four launches.

    Args:
        heads: ``[…, rows, at least num_q + num_k, head_dim]``: queries, then keys.
        cos, sin: ``[…, rows, 1, head_dim]``, sin negated in its first half.

    Returns:
        ``[…, rows, num_q, head_dim]`` and ``[…, rows, num_k, head_dim]``, contiguous.
    """
    turned = heads[..., : num_q + num_k, :]
    first, second = turned.chunk(2, -1)
    straight, swapped = turned * cos, torch.cat((second, first), -1)
    q = torch.addcmul(straight[..., :num_q, :], swapped[..., :num_q, :], sin)
    return q, torch.addcmul(straight[..., num_q:, :], swapped[..., num_q:, :], sin)
