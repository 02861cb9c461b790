"""A tiny model and a draft head that is right by construction where it can be: for tests, the soak and drawings.

The model is a tiny Llama whose layers add only `strength` times their part, so that its text depends on the last token
above all. The head says what it would say if the layers did nothing: ``lm_head(norm(embedding))``. At strength 0 it is
right always, at 0.01 for about two tokens in a row, at 1 hardly ever.
"""

from __future__ import annotations

import torch

from ..models import CausalLM, wrap_model
from ..models.tiny import tiny_hf_model
from .config import HeadConfig
from .head import DraftHead


def tiny_pair(
    strength: float = 0.01, *, vocab_size: int = 256, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[CausalLM, DraftHead]:
    """The model and its head, float32."""
    hf = tiny_hf_model("llama", seed, vocab_size=vocab_size)
    for layer in hf.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_(strength)
    width = int(hf.config.hidden_size)
    head = DraftHead(HeadConfig(width, vocab_size, 4, 2, 12, 96, (0, 1)))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.zero_()
    # Behind the target the fused feature is 0. Behind the head itself it is the normalised embedding of the token
    # before, which the second half takes away again.
    one = torch.eye(width)
    head.fc.weight.data.copy_(torch.cat((one, -one), 1))
    head.output_norm.weight.data.copy_(hf.model.norm.weight.data)
    return wrap_model(hf.to(device), name=f"tiny-markov-{strength}"), head.to(device).requires_grad_(False).eval()
