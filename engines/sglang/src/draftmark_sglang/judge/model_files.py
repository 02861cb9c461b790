"""Configurations of tiny models; SGLang makes up their weights itself (`load_format="dummy"`)."""

from __future__ import annotations

from pathlib import Path

from ..small_models import write_config
from .setups import CONTEXT, HEAD_DIM, HEADS, KV_HEADS


def write_models(folder: Path) -> tuple[Path, Path]:
    """A Llama of one layer, and an EAGLE head for it."""
    shape = dict(
        vocab_size=32,
        hidden_size=HEADS * HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
    )
    target = write_config(folder / "target", "LlamaForCausalLM", **shape)
    return target, write_config(folder / "head", "LlamaForCausalLMEagle", **shape)
