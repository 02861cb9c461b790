"""Random MTP layers for tests and examples, made in memory for a tiny model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from ..models import CausalLM, wrap_model
from ..models.tiny import tiny_hf_model
from .files import mtp_layers
from .head import MtpHead

SPREAD = 0.3
"""Standard deviation of random weights, as in the tiny models."""


def tiny_mtp(model: CausalLM, seed: int = 0, num_modules: int = 1) -> MtpHead:
    """Make MTP layers of the model's family with wide random weights; their drafts are almost never right."""
    module = _module(model.hf, num_modules)
    draw = torch.Generator().manual_seed(seed)
    for parameter in module.layers.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * SPREAD)  # the same on every device
    return MtpHead(module, model)


def tiny_mtp_pair(
    family: str,
    strength: float = 0.01,
    seed: int = 0,
    *,
    num_modules: int = 1,
    device: torch.device | str = "cpu",
    **overrides: Any,
) -> tuple[CausalLM, MtpHead]:
    """Make a tiny model and its MTP layers with a chosen acceptance rate, as `eagle.tiny.tiny_pair` does.

    Args:
        family: a key of `models.tiny.FAMILIES`.
        strength: factor on the output of every attention and MLP.
        overrides: fields of the model's configuration.
    """
    hf = tiny_hf_model(family, seed, **overrides)
    _weaken(hf.model.layers, strength)
    model = wrap_model(hf.to(device), name=f"tiny-markov-{family}")
    head = tiny_mtp(model, seed + 1, num_modules)
    _weaken(head.module.layers, strength)
    one = torch.eye(model.hidden_size, device=device)
    for layer in head.module.layers:
        layer.eh_proj.weight.data.copy_(torch.cat((one, torch.zeros_like(one)), 1))
        layer.post_norm.weight.data.copy_(hf.model.norm.weight.data)
    return model, head


def _module(hf: Any, count: int) -> Any:
    config = hf.config.get_text_config()
    with mtp_layers(config, count), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MtpModel(hf, count)
    module.layers.to(hf.device, hf.dtype)
    return module


def _weaken(layers: Any, strength: float) -> None:
    """Multiply the weights of the last product of every attention and MLP by `strength`."""
    for name, parameter in layers.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data.mul_(strength)
