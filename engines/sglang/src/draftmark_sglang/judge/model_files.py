"""Configurations of tiny models; SGLang makes up their weights itself (`load_format="dummy"`)."""

from __future__ import annotations

import json
from pathlib import Path

from .setups import CONTEXT, HEAD_DIM, HEADS, KV_HEADS


def write_models(folder: Path) -> tuple[Path, Path]:
    """A Llama of one layer, and an EAGLE head for it."""
    return _write(folder / "target", "LlamaForCausalLM"), _write(folder / "head", "LlamaForCausalLMEagle")


def _write(folder: Path, architecture: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": HEADS * HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
