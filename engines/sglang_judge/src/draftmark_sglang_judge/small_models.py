"""Configurations of small Llamas and EAGLE heads, for the judge, benchmarks and tests. SGLang makes random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="float32",
    bos_token_id=0,
    eos_token_id=1,
)


def write_config(folder: Path, architecture: str, **shape: Any) -> Path:
    """Write `folder`/config.json, and return the folder.

    Args:
        architecture: class name of an SGLang model, e.g. ``LlamaForCausalLM``.
        shape: fields of a Llama's config.json that `LLAMA` lacks or that replace its values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(architectures=[architecture]) | LLAMA | shape
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
