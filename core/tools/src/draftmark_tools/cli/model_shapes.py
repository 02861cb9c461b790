"""Attention shapes of a model's layers, from its config.json. Integers only: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftmark.geometry import AttentionShape

from ..models import latent_shape
from .errors import ArgumentError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Names of layer types in Hugging Face configurations. Layers of other types have no attention of this kind."""
SINKS = ("gpt_oss",)
"""Model types with an attention sink for each query head."""
BY_FLAGS = "leave --model out, and describe the layer by --num-qo-heads, --num-kv-heads and --head-dim"


def model_shapes(
    folder: str, ranks: int, page_size: int, dtype: str | None = None, kv_dtype: str | None = None
) -> list[AttentionShape]:
    """Return the distinct attention shapes of a model's layers on one of `ranks` tensor-parallel ranks.

    A configuration with a window and without layer types gives two shapes, with the window and without it, since
    model types differ in which layers have it.

    Args:
        folder: folder with config.json, or the file itself.
        page_size: tokens of a KV page.
        dtype: torch dtype name of queries; None means the configuration's, or bfloat16.
        kv_dtype: torch dtype name of the cache; None means the dtype of queries.

    Raises:
        ArgumentError: there is no readable configuration, or it does not describe attention heads.
        GeometryError: a value is out of range.
    """
    config = _read(Path(folder))
    q_dtype = dtype or _dtype(config)
    kv = kv_dtype or q_dtype
    text = config
    if isinstance(config.get("text_config"), Mapping) and config.get("num_attention_heads") is None:
        text = config["text_config"]
    if text.get("kv_lora_rank") is not None:
        return [latent_shape(text, ranks=ranks, page_size=page_size, dtype=q_dtype, kv_dtype=kv)]
    found = [
        AttentionShape(
            *_heads(text, kind, ranks), page_size, q_dtype, kv, window_left=window_left,
            logits_soft_cap=float(text.get("attn_logit_softcapping") or 0.0), sinks=text.get("model_type") in SINKS,
        )
        for kind, window_left in _layer_kinds(text)
    ]  # fmt: skip
    if not found:
        raise ArgumentError(f"--model is {folder!r}, whose layer_types name no layer with attention; {BY_FLAGS}")
    return list(dict.fromkeys(found))


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(f"--model is {str(path)!r}, which has no config.json; name a model's folder") from None
    except ValueError as error:
        raise ArgumentError(
            f"--model is {str(path)!r}, but {file.name} is not JSON ({error}); fetch it again"
        ) from None
    if not isinstance(found, Mapping):
        raise ArgumentError(f"--model is {str(path)!r}, but {file.name} is not a JSON object; fetch it again")
    return found


def _dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, Mapping) else (config,)
    names = [one.get(name) for one in parts for name in ("dtype", "torch_dtype")]
    return next((name for name in names if isinstance(name, str) and name != "auto"), "bfloat16")


def _layer_kinds(text: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield layer type and window_left of each kind of layer; -1 means no window."""
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    kinds = text.get("layer_types") or (FULL, SLIDING)
    if FULL in kinds:
        yield FULL, -1
    if SLIDING in kinds and window:
        yield SLIDING, _integer(text, "sliding_window") - 1


def _heads(text: Mapping[str, Any], kind: str, ranks: int) -> tuple[int, int, int]:
    """Return query heads, KV heads and head_dim of a rank. Layers without a window can have their own (Gemma 4)."""
    own = {name: value for name, value in _own_names(text, kind).items() if text.get(value) is not None}
    heads = _integer(text, "num_attention_heads")
    kv_name = own.get("num_key_value_heads", "num_key_value_heads")
    kv_heads = heads if text.get(kv_name) is None else _integer(text, kv_name)
    dim_name = own.get("head_dim", "head_dim")
    head_dim = _integer(text, "hidden_size") // heads if text.get(dim_name) is None else _integer(text, dim_name)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ArgumentError(
            f"--ranks is {ranks}, but it must divide {heads} query heads, and divide {kv_heads} KV heads or be a "
            "multiple of them; choose another number"
        )
    return heads // ranks, max(1, kv_heads // ranks), head_dim


def _own_names(text: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Return the fields that layers of a kind use in place of the usual ones."""
    if kind != FULL or not text.get("layer_types"):
        return {}
    return {"num_key_value_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"}


def _integer(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if type(value) is not int or value < 1:
        raise ArgumentError(f"config.json has {name} = {value!r}, but it must be an integer of 1 or more; {BY_FLAGS}")
    return value
