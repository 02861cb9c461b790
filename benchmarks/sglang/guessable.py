"""A small random Llama with predictable next tokens, and an EAGLE head that often predicts them.

The Llama's logits are far apart, so two ways to compute them rarely choose different tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from draftmark_sglang_judge.small_models import write_config

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 512, 1024, 8, 2, 128, 2048, 4


def write_guessable(folder: Path, dtype: str) -> None:
    """Write the models to FOLDER/target and FOLDER/draft."""
    make = torch.Generator().manual_seed(7)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=make),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 0.2 * torch.randn(VOCABULARY, HIDDEN, generator=make),
    }
    for layer in range(LAYERS):
        weights |= _layer(make, f"model.layers.{layer}", 0.009)
    _write(folder / "target", "LlamaForCausalLM", LAYERS, weights, dtype)
    through = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    head = {"fc.weight": through + 0.01 * torch.randn(through.shape, generator=make), "fc.bias": torch.zeros(HIDDEN)}
    head |= _layer(make, "layers.0", 0.008)
    del head["layers.0.input_layernorm.weight"]
    _write(folder / "draft", "LlamaForCausalLMEagle", 1, head, dtype)


def _layer(make: torch.Generator, name: str, scale: float) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    # Query and key weights are larger than the other weights, so that attention depends on positions.
    sizes = {key: 4 * scale if key.endswith(("q_proj", "k_proj")) else 2 * scale for key in shapes}
    weights = {f"{name}.{key}.weight": sizes[key] * torch.randn(shape, generator=make) for key, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(HIDDEN)
    return weights


def _write(folder: Path, architecture: str, layers: int, weights: dict[str, torch.Tensor], dtype: str) -> None:
    write_config(
        folder,
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INNER,
        max_position_embeddings=2048,
        torch_dtype=dtype,
    )
    kind = getattr(torch, dtype)
    save_file({name: one.to(kind) for name, one in weights.items()}, folder / "model.safetensors")
