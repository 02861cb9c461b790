"""Tiny model and draft head with a chosen acceptance rate, for tests, the soak test and drawings.

The model is a tiny Llama, or one with recurrent state. Its layers add only `strength` times their output, so its text
depends mostly on the last token. The head computes the logits of a model without layers:
``lm_head(norm(embedding))``. At strength 0 the head is always right, at 0.01 for about two tokens in a row, at 1 almost
never.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..models import CausalLM, wrap_model
from ..models.tiny import tiny_hf_model
from .config import HeadConfig
from .head import DraftHead

OUTPUTS = ("o_proj", "out_proj", "down_proj", "w2", "output_linear")
"""Names of the linear layers that write to the residual stream."""


def tiny_pair(
    strength: float = 0.01,
    *,
    family: str = "llama",
    vocab_size: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    head_dim: int | None = None,
    **overrides: Any,
) -> tuple[CausalLM, DraftHead]:
    """Make a tiny model and its draft head, with the same weights in every dtype.

    Args:
        family: of the model; see `tiny_model`. Its final norm must have a weight of 1 at first.
        head_dim: head dimension of both; None gives the model its default and the head 12.
        overrides: fields of the model's configuration.
    """
    if head_dim is not None:
        overrides["head_dim"] = head_dim
    hf = tiny_hf_model(family, seed, vocab_size=vocab_size, **overrides)
    for name, module in hf.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in OUTPUTS:
            module.weight.data.mul_(strength)
    width = int(hf.config.hidden_size)
    head = DraftHead(HeadConfig(width, vocab_size, 4, 2, head_dim or 12, 96, (0, 1)))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.zero_()
    # The feature is 0 in a row that follows the target's forward. In a row that follows the head's own forward it is
    # the normalised embedding of the previous token, which the second half of this weight subtracts.
    one = torch.eye(width)
    head.fc.weight.data.copy_(torch.cat((one, -one), 1))
    kind = getattr(torch, dtype)
    model = wrap_model(hf.to(device, kind), name=f"tiny-markov-{strength}")
    return model, head.to(device, kind).requires_grad_(False).eval()
