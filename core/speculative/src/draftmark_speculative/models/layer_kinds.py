"""Kinds of decoder layers in a configuration: attention, recurrent state, both, or neither.

transformers names the kinds in ``layer_types``. The families with state that draftmark decodes are listed here, and
reasons why it does not decode others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PAGED = ("full_attention", "sliding_attention")
"""Layers with attention over the paged KV cache."""
STATE = ("linear_attention", "conv")
"""Layers with recurrent state or a short convolution."""
BOTH = ("hybrid",)
"""Layers with attention and state side by side."""
NEITHER = ("mlp", "moe")
"""Layers without memory of earlier tokens."""

HYBRIDS = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"),
    *("granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "minimax", "lfm2", "lfm2_moe", "lfm3"),
)
"""Model types with state that draftmark decodes."""

_MAMBA1 = "its Mamba1 layers have one decay for each channel and state element, which draftmark does not compute"
_OTHERS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _MAMBA1),
    "mamba2": "it has no attention layers, and the loop counts its pages by attention",
    "zamba2": "several of its layers share one attention block, and each needs KV pages of its own",
    "recurrent_gemma": "its RG-LRU layers have a recurrence that draftmark does not compute",
}
REMEDY = "use Qwen3.5, Qwen3-Next, Granite 4, Nemotron-H, Falcon-H1 or LFM2, or a model with attention layers only"


def attention_layers(config: Any) -> list[int]:
    """Return the decoder layers with attention, by the (text) configuration."""
    return _of_kinds(config, (*STATE, *NEITHER), wanted=False)


def state_layers(config: Any) -> list[int]:
    """Return the decoder layers with state, by the (text) configuration."""
    return _of_kinds(config, (*STATE, *BOTH), wanted=True)


def _of_kinds(config: Any, kinds: tuple[str, ...], wanted: bool) -> list[int]:
    count, types = int(config.num_hidden_layers), _types(config)
    return [layer for layer in range(count) if ((types[layer] if layer < len(types) else PAGED[0]) in kinds) is wanted]


def layer_reasons(config: Any, family: str) -> Iterator[str]:
    """Yield reasons why draftmark cannot decode the configuration's layers."""
    served = (*PAGED, *STATE, *BOTH, *NEITHER) if family in HYBRIDS else PAGED
    other = sorted(set(_types(config)) - set(served))
    if any("chunk" in kind for kind in other) or getattr(config, "attention_chunk_size", None):
        yield (
            "it has chunked attention layers, but transformers does not pass their chunk size to attention; "
            "use a model with full or sliding-window layers"
        )
    if family in _OTHERS:
        yield f"{_OTHERS[family]}; {REMEDY}"
    if family in HYBRIDS and not attention_layers(config):
        yield f"{_OTHERS['mamba2']}; {REMEDY}"
    if not hasattr(config, "num_attention_heads"):
        yield f"it has no attention heads (a recurrent or state-space model); {REMEDY}"
    if other:
        yield f"it has {', '.join(other)} layers, which keep a state that draftmark does not compute; {REMEDY}"


def _types(config: Any) -> list[str]:
    return [str(kind) for kind in getattr(config, "layer_types", None) or ()]
