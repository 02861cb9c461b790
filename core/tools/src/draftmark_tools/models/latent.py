"""The shape of a latent (MLA) layer from a model's Hugging Face configuration. Integers only, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from draftmark.errors import GeometryError
from draftmark.geometry import PLAIN_ROWS, AttentionShape
from draftmark.geometry.checks import is_number

from .config_fields import field_of, integer_of

ABSENT = "the configuration has no kv_lora_rank, the value width of latent attention"
WRITE_IT = "pass a configuration with MLA fields (DeepSeek V2 or later, Kimi K2, GLM-5), or write AttentionShape(…)"


def latent_shape(
    config: object,
    *,
    ranks: int = 1,
    page_size: int,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    dense: bool = False,
    row_format: str = PLAIN_ROWS,
) -> AttentionShape:
    """Return the attention shape of a model's absorbed latent layers, on one of `ranks` tensor-parallel ranks.

    A row is the compressed KV (kv_lora_rank elements, the value) and the rotated rest of the key (qk_rope_head_dim).
    The softmax scale is that of the heads before absorption: ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``. RoPE
    with mscale_all_dim multiplies it by mscale twice, ``mscale = 1 + 0.1 · mscale_all_dim · ln(factor)``, as in
    transformers' DeepSeek V3. Scales that a model applies to q or to the compressed KV itself (LongCat, Mistral 4) are
    not part of it. A sliding window of all layers becomes window_left, and learned sinks (Hy-V4) become `sinks`. The
    keys that an indexer chooses for a row (index_topk of DeepSeek V3.2 and GLM-5) become chosen_width. The indexer
    itself belongs to the engine, which fills `ForwardBatch.chosen`.

    Args:
        config: a configuration of transformers, or config.json as a mapping. A multimodal configuration's text_config
            is used. If layers differ, the configuration of one layer (``config.per_layer_config[i]``).
        ranks: tensor-parallel ranks; the query heads are divided among them, and each rank stores the whole row.
        page_size: tokens of a KV page.
        dtype: torch dtype name of queries and outputs.
        kv_dtype: torch dtype name of the cache; None means `dtype`, and float8_e4m3fn with `FP8_DS_MLA`.
        dense: give the shape of a layer that attends to all keys, although the model has layers with chosen keys or
            sliding windows. It is exact while no request exceeds index_topk tokens or the window.
        row_format: format of the stored rows.

    Raises:
        GeometryError: the configuration has no latent layer, a field is out of range, or ranks do not divide the heads.
            Without `dense` also: an indexer chooses pools of keys (index_kpool), or only some layers have a sliding
            window.
    """
    text = _text(config)
    window, width = (-1, 0) if dense else (_window_left(text), _chosen_width(text))
    rank, rotated = integer_of(text, "kv_lora_rank", 1), integer_of(text, "qk_rope_head_dim", 0)
    heads, plain = integer_of(text, "num_attention_heads", 1), integer_of(text, "qk_nope_head_dim", 1)
    if type(ranks) is not int or ranks < 1 or heads % ranks:
        limit = f"it must be an integer that divides the {heads} query heads"
        raise GeometryError("ranks", ranks, limit, "use a divisor of the heads")
    scale = (plain + rotated) ** -0.5
    return AttentionShape(
        num_qo_heads=heads // ranks,
        num_kv_heads=1,
        head_dim=rank + rotated,
        page_size=page_size,
        q_dtype=dtype,
        kv_dtype=cache_dtype(kv_dtype, dtype, row_format),
        softmax_scale=scale * _mscale(text) ** 2 if rotated else scale,
        window_left=window,
        sinks=field_of(text, "learnable_sink_init") is not None,
        value_dim=rank,
        latent=True,
        chosen_width=width,
        row_format=row_format,
    )


def cache_dtype(kv_dtype: str | None, dtype: str, row_format: str) -> str:
    """Return `kv_dtype`, or the default dtype of a cache: that of the queries, or e4m3 for rows of `FP8_DS_MLA`."""
    if kv_dtype is not None:
        return kv_dtype
    return dtype if row_format == PLAIN_ROWS else "float8_e4m3fn"


def _text(config: object) -> object:
    """Return the part of a configuration that has kv_lora_rank: itself, or its text_config."""
    for one in (config, field_of(config, "text_config")):
        if field_of(one, "kv_lora_rank") is not None:
            return one
    name = field_of(config, "model_type") or type(config).__name__
    raise GeometryError("config", name, ABSENT, WRITE_IT)


def _window_left(config: object) -> int:
    """Return the window of all layers, -1 for none; refuse layers that see other keys than those of one window."""
    window = field_of(config, "sliding_window")
    kinds = field_of(config, "layer_types")
    slides = kinds is None or "sliding_attention" in kinds
    if not window or not slides or field_of(config, "use_sliding_window") is False:
        return -1
    if kinds is not None and set(kinds) != {"sliding_attention"}:
        limit = "only its layers of the type sliding_attention have a window"
        topk = field_of(config, "index_topk")
        others = "" if topk is None else f", and chosen_width={topk} on theirs"
        left = f"window_left={window - 1} on the shape of these layers{others}"
        remedy = f"pass dense=True for the other layers, and set {left}"
        raise GeometryError("config.sliding_window", window, limit, remedy)
    return integer_of(config, "sliding_window", 1) - 1


def _chosen_width(config: object) -> int:
    """Return the entries of a row's list of chosen keys; 0 for layers without an indexer."""
    if field_of(config, "index_topk") is None:
        return 0
    pool = field_of(config, "index_kpool")
    if pool is not None:
        limit = "its indexer chooses pools of keys and adds the newest keys, so lists are longer than index_topk"
        remedy = "pass dense=True, and set chosen_width to the length of its lists"
        raise GeometryError("config.index_kpool", pool, limit, remedy)
    return integer_of(config, "index_topk", 1)


def _mscale(config: object) -> float:
    """Return the factor that scaled RoPE applies to queries and to keys; 1 without mscale_all_dim."""
    found = {_mscale_of(one) for one in _ropes(config)}
    if len(found) > 1:
        limit = "its layer types have different mscale factors"
        raise GeometryError("config.rope_parameters", sorted(found), limit, "write one AttentionShape per layer type")
    return found.pop() if found else 1.0


def _ropes(config: object) -> list[Mapping[str, Any]]:
    """Return the RoPE parameters: one mapping, or one for each layer type."""
    parameters = field_of(config, "rope_parameters") or field_of(config, "rope_scaling")
    if parameters is None:
        return []
    if not isinstance(parameters, Mapping):
        limit = "it must be a mapping or None"
        raise GeometryError("config.rope_parameters", parameters, limit, "use the config.json of the weights")
    nested = [one for one in parameters.values() if isinstance(one, Mapping)]
    return nested or [parameters]


def _mscale_of(rope: Mapping[str, Any]) -> float:
    kind = rope.get("rope_type", rope.get("type", "default"))
    weight = rope.get("mscale_all_dim") or 0
    if kind == "default" or not weight:
        return 1.0
    factor: Any = rope.get("factor")
    for name, value in (("factor", factor), ("mscale_all_dim", weight)):
        if not is_number(value) or value <= 0:
            limit = f"{kind} RoPE with mscale_all_dim needs a positive number"
            raise GeometryError(f"config.rope_parameters.{name}", value, limit, "use the config.json of the weights")
    return 1.0 if factor <= 1 else 0.1 * float(weight) * math.log(factor) + 1.0
