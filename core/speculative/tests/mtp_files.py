"""A model folder with an MTP layer, in the tensor names that DeepSeek V3 publishes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftmark_speculative import MtpHead
from draftmark_speculative.models import CausalLM


def write_mtp(folder: Path, model: CausalLM, head: MtpHead) -> None:
    """Add the tensors ``model.layers.N.*`` of each MTP layer to a folder: one tensor per expert and product."""
    tensors = load_file(folder / "model.safetensors")
    for number, layer in enumerate(head.module.layers, start=model.hf.config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        for name, tensor in layer.state_dict().items():
            tensors |= {prefix + key: one for key, one in _published(name.removeprefix("mtp_block."), tensor)}
        tensors[prefix + "embed_tokens.weight"] = model.hf.get_input_embeddings().weight.detach().clone()
        tensors[prefix + "shared_head.head.weight"] = model.lm_head.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the published names and tensors of one tensor of an MTP layer."""
    stacked = re.fullmatch(r"mlp\.experts\.(gate_up_proj|down_proj)", name)
    if stacked is None:
        yield name.replace("post_norm.", "shared_head.norm.", 1 if name[0] == "p" else 0), tensor.clone()
        return
    for number, expert in enumerate(tensor):
        parts = {"down_proj": expert}
        if stacked[1] == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
        for part, weight in parts.items():
            yield f"mlp.experts.{number}.{part}.weight", weight.clone()
