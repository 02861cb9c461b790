"""Configurations of Llama-8B's shape with dummy weights, of its EAGLE head, and of tiny models for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftmark_sglang_judge.small_models import write_config

REAL: dict[str, Any] = dict(
    vocab_size=128256,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    max_position_embeddings=40960,
    rope_theta=500000.0,
    torch_dtype="bfloat16",
)
REHEARSED: dict[str, Any] = REAL | dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    torch_dtype="float32",
)


def write_models(folder: Path, shape: dict[str, Any]) -> None:
    """Write the configurations of target and draft model. SGLang generates their weights."""
    write_config(folder / "target", "LlamaForCausalLM", **shape)
    write_config(folder / "draft", "LlamaForCausalLMEagle", **(shape | dict(num_hidden_layers=1)))
