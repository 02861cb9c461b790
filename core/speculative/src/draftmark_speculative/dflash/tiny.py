"""Tiny block heads with random weights, for tests and examples."""

from __future__ import annotations

import torch

from ..models import CausalLM
from .head import BlockConfig, BlockHead

SPREAD = 0.3
"""Standard deviation of random weights, as in the tiny models."""


def tiny_block_head(
    model: CausalLM, causal: tuple[bool, ...] = (False, True), block_size: int = 6, seed: int = 0
) -> BlockHead:
    """Make a block head for a tiny model with wide random weights. Its drafts are right only by chance.

    Args:
        causal: for each layer, True if its blocks are causal. Every second layer has a sliding window.
    """
    count = len(model.layers)
    windows = tuple((-1, 7)[layer % 2] for layer in range(len(causal)))
    config = BlockConfig(
        model.hidden_size, model.vocab_size, 4, 2, 12, 96, (0, count), block_size=block_size,
        mask_token_id=model.vocab_size - 1, causal=causal, windows=windows,
    )  # fmt: skip
    head, draw = BlockHead(config), torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * SPREAD)
    return head.to(model.dtype).requires_grad_(False).eval()
