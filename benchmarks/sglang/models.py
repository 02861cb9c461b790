"""Llama-8B's shape with dummy weights, an EAGLE head of one such layer, and small ones to rehearse on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REAL: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    max_position_embeddings=40960,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
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
    """The configurations of target and draft model; SGLang makes up their weights."""
    for name, architecture, layers in (
        ("target", "LlamaForCausalLM", shape["num_hidden_layers"]),
        ("draft", "LlamaForCausalLMEagle", 1),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        config = shape | dict(architectures=[architecture], num_hidden_layers=layers)
        (folder / name / "config.json").write_text(json.dumps(config))
