"""Refusals by name: what a configuration says that paged attention would run wrongly.

They read the configuration only, so they come before the weights are loaded. What no configuration says is found by
running the model (`probe`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftmark.errors import ModelError

SINK_FAMILIES = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter")
ALIBI_FAMILIES = ("bloom", "mpt")
SPARSE_FIELDS = ("index_topk", "index_topk_blocks")
BATCH_DEPENDENT_ROPE = {
    "longrope": "picks one set of frequencies for the whole batch by its longest request",
    "dynamic": "rescales its frequencies by the longest request of the batch",
}
PAGED_LAYER_TYPES = ("full_attention", "sliding_attention")


def refuse(config: Any, name: str) -> None:
    """Raise `ModelError` for the first reason why `config` cannot be served; `name` is the model's, for the message."""
    text = config.get_text_config()
    family = getattr(text, "model_type", "") or "unknown"
    try:
        reason = next(_reasons(text, family), None)
    except Exception as error:  # some configurations answer a question about "the" head_dim by raising
        cause = str(error).strip().split(". ")[0]
        reason = f"its configuration has no one attention shape ({cause}); use another model"
    if reason is not None:
        raise ModelError(f"model {name!r} (family {family}) cannot be decoded: {reason}")


def _reasons(config: Any, family: str) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder and needs cross attention; use a decoder-only model"
    if family in SINK_FAMILIES:
        yield "it uses attention sinks, which draftmark's backends do not implement; use a model without sinks"
    if getattr(config, "kv_lora_rank", None):
        yield (
            "it uses multi-head latent attention (kv_lora_rank), whose keys and values differ in width; "
            "use a grouped-query model"
        )
    if any(hasattr(config, field) for field in SPARSE_FIELDS):
        yield "it picks keys with an indexer (sparse attention), which draftmark would drop; use a dense model"
    yield from _layer_reasons(config)
    if family in ALIBI_FAMILIES or getattr(config, "alibi", False):
        yield "it uses ALiBi, a position bias on the logits that draftmark would drop; use a RoPE model"
    yield from _rope_reasons(config)
    if getattr(config, "use_bidirectional_attention", False):
        yield "it attends both ways (use_bidirectional_attention); use a causal model"
    for field in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size"):
        if not isinstance(getattr(config, field, None), int):
            yield f"its configuration has no single {field}, so it is not a plain attention model; use one that has"
    _ = getattr(config, "head_dim", None)  # raises where layers differ


def _layer_reasons(config: Any) -> Iterator[str]:
    types = getattr(config, "layer_types", None) or ()
    other = sorted({str(kind) for kind in types} - set(PAGED_LAYER_TYPES))
    if any("chunk" in kind for kind in other) or getattr(config, "attention_chunk_size", None):
        yield (
            "it has chunked attention layers, whose chunk size transformers does not pass to the attention function; "
            "use a model with full or sliding-window layers"
        )
    if other:
        yield (
            f"it has {', '.join(other)} layers, which keep a recurrent or other state outside the paged cache; "
            "use a model with full or sliding-window attention layers only"
        )
    if not hasattr(config, "num_attention_heads"):
        yield "it has no attention heads (a recurrent or state-space model); use a decoder with attention"


def _rope_reasons(config: Any) -> Iterator[str]:
    for kind in sorted(rope_types(config)):
        if kind in BATCH_DEPENDENT_ROPE:
            yield (
                f"its {kind} RoPE {BATCH_DEPENDENT_ROPE[kind]}, so shorter requests beside it come out wrong; "
                "use a model with default, linear, llama3 or yarn RoPE"
            )


def rope_types(config: Any) -> set[str]:
    """RoPE types in ``rope_parameters``, flat or by layer type; empty when the model has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in (nested or [parameters]) if one}
