"""Configurations of tiny models. SGLang creates random weights for them (`load_format="dummy"`)."""

from __future__ import annotations

from pathlib import Path

from ..small_models import write_config
from .setups import CONTEXT, Heads


def write_models(folder: Path, heads: Heads) -> tuple[Path, Path]:
    """Write the folders of a Llama of one layer and of an EAGLE head for it, and return both paths."""
    shape = dict(
        vocab_size=32,
        hidden_size=heads.num_qo_heads * heads.head_dim,
        num_hidden_layers=1,
        num_attention_heads=heads.num_qo_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        torch_dtype=heads.dtype,
    )
    target = write_config(folder / "target", "LlamaForCausalLM", **shape)
    return target, write_config(folder / "head", "LlamaForCausalLMEagle", **shape)
