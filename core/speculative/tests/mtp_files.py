"""A model folder with an MTP layer, in the tensor names that DeepSeek V3 publishes."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from draftmark_speculative import MtpHead
from draftmark_speculative.models import CausalLM


def write_mtp(folder: Path, model: CausalLM, head: MtpHead) -> None:
    """Add the tensors ``model.layers.N.*`` to a folder: one tensor per expert and product, as DeepSeek does."""
    prefix = f"model.layers.{model.hf.config.num_hidden_layers}."
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in head.module.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.")
        stacked = re.fullmatch(r"mlp\.experts\.(gate_up_proj|down_proj)", name)
        if stacked is None:
            tensors[prefix + name.replace("post_norm.", "shared_head.norm.", 1 if name[0] == "p" else 0)] = (
                tensor.clone()
            )
            continue
        for number, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if stacked[1] == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, weight in parts.items():
                tensors[f"{prefix}mlp.experts.{number}.{part}.weight"] = weight.clone()
    tensors[prefix + "embed_tokens.weight"] = model.hf.get_input_embeddings().weight.detach().clone()
    tensors[prefix + "shared_head.head.weight"] = model.lm_head.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
