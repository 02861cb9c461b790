"""Models rejected by their configuration, because paged attention would run them incorrectly.

`refuse` reads only the configuration, so it runs before the weights are loaded. `probe` runs the model and finds
features that no configuration declares. `verify` compares the configuration with the calls that the probe recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import isclose
from typing import Any

from draftmark import DraftmarkError, ModelError
from draftmark_tools.models import latent_shape

from .attention import LayerAttention
from .layer_kinds import layer_reasons

ALIBI_FAMILIES = ("bloom", "mpt")
SPARSE_FIELDS = ("index_topk", "index_topk_blocks")
BATCH_DEPENDENT_ROPE = {
    "longrope": "picks one set of frequencies for the whole batch by its longest request",
    "dynamic": "rescales its frequencies by the longest request of the batch",
}


def refuse(config: Any, name: str) -> None:
    """Raise `ModelError` for the first reason why `config` cannot be served; `name` is the model's name."""
    text = config.get_text_config()
    family = getattr(text, "model_type", "") or "unknown"
    try:
        reason = next(_reasons(text, family), None)
    except Exception as error:  # some configurations raise on reading a field that differs between layers
        cause = str(error).strip().split(". ")[0]
        reason = f"its configuration has no single attention shape ({cause}); use another model"
    if reason is not None:
        raise ModelError(f"model {name!r} (family {family}) cannot be decoded: {reason}")


def _reasons(config: Any, family: str) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder and needs cross attention; use a decoder-only model"
    if any(hasattr(config, field) for field in SPARSE_FIELDS):
        yield "it picks keys with an indexer (sparse attention), which the loop does not run; use a dense model"
    yield from layer_reasons(config, family)
    if family in ALIBI_FAMILIES or getattr(config, "alibi", False):
        yield "it uses ALiBi, a position bias on the logits that draftmark would drop; use a RoPE model"
    yield from _rope_reasons(config)
    if is_latent(config):
        yield from _latent_reasons(config)
    if getattr(config, "use_bidirectional_attention", False):
        yield "it attends both ways (use_bidirectional_attention); use a causal model"
    for field in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size"):
        value = getattr(config, field, None)
        if not isinstance(value, int):
            yield f"its configuration has no single {field}, so it is not a plain attention model; use one that has"
        elif value < 1:
            yield f"its configuration has {field} {value}, but it must be >= 1; use the config.json of the weights"
    _ = getattr(config, "head_dim", None)  # some configurations raise on this read if their layers differ


def is_latent(config: Any) -> bool:
    """Return True if the (text) configuration has multi-head latent attention."""
    return bool(getattr(config, "kv_lora_rank", None))


def _latent_reasons(config: Any) -> Iterator[str]:
    try:
        latent_shape(config, page_size=1, dense=True)  # SPARSE_FIELDS refuses indexers
    except DraftmarkError as error:
        yield f"its latent attention has no single shape ({error}); use the config.json that came with the weights"


def _rope_reasons(config: Any) -> Iterator[str]:
    for kind in sorted(rope_types(config)):
        if kind in BATCH_DEPENDENT_ROPE:
            yield (
                f"its {kind} RoPE {BATCH_DEPENDENT_ROPE[kind]}, so shorter requests in that batch come out wrong; "
                "use a model with default, linear, llama3 or yarn RoPE"
            )


def rope_types(config: Any) -> set[str]:
    """Return the RoPE types in ``rope_parameters``, flat or by layer type; empty if the model has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in (nested or [parameters]) if one}


def verify(
    config: Any, called: tuple[LayerAttention, ...], name: str, decoder_layers: Sequence[int] | None = None
) -> tuple[LayerAttention, ...]:
    """Return `called` if the text `config` has equal parameters for every layer with attention.

    A configured window or cap that never reaches the attention function is in a mask or unused. draftmark would
    ignore such a window or cap.

    Args:
        decoder_layers: decoder layer of each of `called`; None if every decoder layer has attention.

    Raises:
        ModelError: the first layer and field that differ.
    """
    for index, layer in zip(decoder_layers or range(len(called)), called, strict=True):
        configured = _configured(config, index, layer)
        for field in (field.name for field in fields(LayerAttention)):
            stated, got = getattr(configured, field), getattr(layer, field)
            if stated != got and not (layer.latent and field == "softmax_scale" and isclose(stated, got)):
                raise ModelError(
                    f"model {name!r} (family {config.model_type}) cannot be decoded: its configuration has {field} "
                    f"{stated} for layer {index}, but the layer calls attention with {got}; use a transformers release "
                    "or a model in which both agree"
                )
    return called


def _configured(config: Any, index: int, called: LayerAttention) -> LayerAttention:
    """Return the configuration's parameters of a layer; the scale is the call's if no field declares it."""
    window = _window_left(config, index)
    if is_latent(config):
        a = latent_shape(config, page_size=1, dense=True)
        assert a.softmax_scale is not None, "a latent shape has a scale"
        row = (a.num_qo_heads, a.num_kv_heads, a.head_dim, a.softmax_scale, window)
        return LayerAttention(*row, value_dim=a.value_dim, latent=True)
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    scale = called.softmax_scale
    if getattr(config, "query_pre_attn_scalar", None):
        scale = float(config.query_pre_attn_scalar) ** -0.5
    elif getattr(config, "attention_multiplier", None):
        scale = float(config.attention_multiplier)
    return replace(
        called,
        num_qo_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        softmax_scale=scale,
        window_left=window,
        logits_soft_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
    )


def _window_left(config: Any, index: int) -> int:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    off = window == 0 or getattr(config, "use_sliding_window", True) is False
    if off or (types and types[index] != "sliding_attention"):
        return -1
    return int(window) - 1
