"""A small random Qwen3-Next with predictable next tokens, and its MTP layer, which often predicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SMALL: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=2048,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=2048,
)
"""Sizes of the model that runs on a GPU."""
LAYERS = ["linear_attention", "full_attention"] * 2
OUTPUTS = ("o_proj", "out_proj", "down_proj")


def write_hybrid(folder: Path, dtype: str, **sizes: Any) -> Path:
    """Write the model's folder and return it.

    Most of a hidden state is the last token's embedding, so the MTP layer predicts from it. The other layers still
    change most texts.

    Args:
        sizes: fields of the configuration that replace those of `SMALL`.
    """
    import transformers

    fixed = dict(num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, full_attention_interval=2)
    fixed |= dict(
        num_hidden_layers=len(LAYERS), layer_types=LAYERS, linear_conv_kernel_dim=4, tie_word_embeddings=False
    )
    config = transformers.Qwen3NextConfig(**SMALL | fixed | sizes)
    model, make = transformers.Qwen3NextForCausalLM(config), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_values(name, parameter, make))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights |= _mtp_layer({name: one for name, one in weights.items() if f".{len(LAYERS) - 1}." in name}, config, make)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def _values(name: str, parameter: torch.Tensor, make: torch.Generator) -> torch.Tensor:
    """Return random weights; the outputs of layers are small, and norms are left as they are."""
    drawn = torch.randn(parameter.shape, generator=make)
    if "embed" in name:
        return drawn
    if "conv" in name or name.endswith("dt_bias"):
        return 0.5 * drawn
    if name.endswith("A_log"):
        return 0.5 * drawn
    if parameter.dim() < 2:
        return parameter.data
    return (0.45 if any(part in name for part in OUTPUTS) else 1.2) / parameter.shape[-1] ** 0.5 * drawn


def _mtp_layer(last: dict[str, torch.Tensor], config: Any, make: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the weights of the MTP layer, with the names and shapes of the last layer's."""
    width = config.hidden_size
    through = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    made = {"mtp.fc.weight": through + 0.16 / width**0.5 * torch.randn(through.shape, generator=make)}
    made |= {
        f"mtp.{name}.weight": torch.zeros(width) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    for name, one in last.items():
        small = 0.16 / width**0.5 * torch.randn(one.shape, generator=make)
        made[name.replace(f"model.layers.{len(LAYERS) - 1}", "mtp.layers.0")] = small if one.dim() > 1 else one
    kind = next(iter(last.values())).dtype
    return {name: one.to(kind).clone() for name, one in made.items()}
