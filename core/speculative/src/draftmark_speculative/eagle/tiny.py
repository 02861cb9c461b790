"""Tiny model and draft head with a chosen acceptance rate, for tests, the soak test and drawings.

The model is a tiny Llama. Its layers add only `strength` times their output, so its text depends mostly on the last
token. The head computes the logits of a model without layers: ``lm_head(norm(embedding))``. At strength 0 the head is
always right, at 0.01 for about two tokens in a row, at 1 almost never.
"""

from __future__ import annotations

from typing import Any

import torch

from ..models import CausalLM, wrap_model
from ..models.tiny import tiny_hf_model
from .config import HeadConfig
from .head import DraftHead


def tiny_pair(
    strength: float = 0.01,
    *,
    vocab_size: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    head_dim: int | None = None,
    **overrides: Any,
) -> tuple[CausalLM, DraftHead]:
    """Make a tiny model and its draft head, with the same weights in every dtype.

    Args:
        head_dim: head dimension of both; None gives the model its default and the head 12.
        overrides: fields of the model's configuration.
    """
    if head_dim is not None:
        overrides["head_dim"] = head_dim
    hf = tiny_hf_model("llama", seed, vocab_size=vocab_size, **overrides)
    for layer in hf.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_(strength)
    width = int(hf.config.hidden_size)
    head = DraftHead(HeadConfig(width, vocab_size, 4, 2, head_dim or 12, 96, (0, 1)))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.zero_()
    # The feature is 0 in a row that follows the target's forward. In a row that follows the head's own forward it is
    # the normalised embedding of the previous token, which the second half of this weight subtracts.
    one = torch.eye(width)
    head.fc.weight.data.copy_(torch.cat((one, -one), 1))
    head.output_norm.weight.data.copy_(hf.model.norm.weight.data)
    kind = getattr(torch, dtype)
    model = wrap_model(hf.to(device, kind), name=f"tiny-markov-{strength}")
    return model, head.to(device, kind).requires_grad_(False).eval()
