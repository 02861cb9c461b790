"""Recurrent layers of a model, read from its Hugging Face configuration. Integers only, no torch.

Field names are those of transformers and of config.json files on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from draftmark.errors import GeometryError
from draftmark.geometry import Gate, Recurrence, StateGeometry, StateShape

from .config_fields import field_of, integer_of

USE = "use the config.json of the weights"


@dataclass(frozen=True)
class StateFacts:
    """Recurrent layers in a model's configuration, per tensor-parallel rank.

    Attributes:
        model_type: model_type of the configuration.
        shape: shape of each layer with state.
        layers: indices of the layers with state, ascending.
        num_layers: layers of the model.
        conv_blocks: name and channels of each part of a window row, in order. Ranks shard each part apart, so a
            transfer between different rank counts moves each part apart (sglang#22060, vllm#55208).
    """

    model_type: str
    shape: StateShape
    layers: tuple[int, ...]
    num_layers: int
    conv_blocks: tuple[tuple[str, int], ...]

    def check(self, geometry: StateGeometry) -> None:
        """Raise `GeometryError` for the first field in which `geometry` differs from the model; dtypes may differ."""
        for name in (one.name for one in fields(StateShape) if not one.name.endswith("dtype")):
            mine, said = getattr(geometry.state, name), getattr(self.shape, name)
            if mine != said:
                remedy = "create the geometry from draftmark_tools.models.state_shape"
                raise GeometryError(f"state.{name}", mine, f"the model has {said!r}", remedy)
        if geometry.num_layers > len(self.layers):
            limit = f"the model has {len(self.layers)} layers with state"
            raise GeometryError("num_layers", geometry.num_layers, limit, "count the layers of this rank")


@dataclass(frozen=True)
class _Whole:
    """A layer with state before it is divided among ranks; `groups` are key heads that ranks may replicate."""

    recurrence: Recurrence
    gate: Gate
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    parts: str = ""
    silu: bool = True
    groups: bool = False


def state_shape(
    config: object,
    ranks: int = 1,
    *,
    dtype: str | None = None,
    state_dtype: str | None = None,
    conv_dtype: str | None = None,
) -> StateShape:
    """Return the shape of a model's layers with state, on one of `ranks` tensor-parallel ranks.

    Families: Qwen3-Next, Qwen3.5, OLMo hybrid (Gated DeltaNet); Kimi-Linear, Ling 3 (KDA); Nemotron-H, Falcon-H1,
    Granite 4 hybrid, Bamba, Zamba2, Mamba2; Jamba (Mamba1); MiniMax-01, Ring (Lightning); LFM2 (short convolution).

    Heads are divided among ranks. Mamba2's groups are divided too; if ranks exceed them, each rank has a copy of one
    group, which needs a multiple of the groups.

    Args:
        config: a configuration of transformers, or config.json as a mapping. A multimodal configuration's text_config
            is used.
        ranks: tensor-parallel ranks.
        dtype: torch dtype name of activations; None reads the configuration (bfloat16 without one).
        state_dtype: torch dtype name of states; None reads mamba_ssm_dtype (float32 without one).
        conv_dtype: torch dtype name of windows; None means `dtype`.

    Raises:
        GeometryError: the configuration has no such layer, a field is out of range, or ranks do not divide the heads.
    """
    return state_facts(config, ranks, dtype=dtype, state_dtype=state_dtype, conv_dtype=conv_dtype).shape


def state_facts(
    config: object,
    ranks: int = 1,
    *,
    dtype: str | None = None,
    state_dtype: str | None = None,
    conv_dtype: str | None = None,
) -> StateFacts:
    """Return the recurrent layers of a model; arguments and errors as in `state_shape`."""
    if type(ranks) is not int or ranks < 1:
        raise GeometryError("ranks", ranks, "it must be an integer >= 1", "count the tensor-parallel ranks")
    nested = field_of(config, "text_config")
    text = config if nested is None else nested
    model = field_of(text, "model_type")
    if not isinstance(model, str) or model not in FAMILIES:
        limit = f"the models with recurrent state are {', '.join(sorted(FAMILIES))}"
        remedy = "pass the config.json of one of them, or write StateShape(…) for another layer with state"
        raise GeometryError("config.model_type", model, limit, remedy)
    whole = FAMILIES[model](text)
    layers, count = _layers(text)
    if not layers:
        raise GeometryError("config.model_type", model, "the types of its layers name none with recurrent state", USE)
    # transformers warns when torch_dtype of an object is read; config.json may have only that name.
    names = ("dtype", "torch_dtype") if isinstance(text, Mapping) else ("dtype",)
    activations = _dtype(text, *names) or "bfloat16" if dtype is None else dtype
    state = _dtype(text, "mamba_ssm_dtype") or "float32" if state_dtype is None else state_dtype
    shape, blocks = _divided(whole, ranks)
    shape = replace(shape, dtype=activations, state_dtype=state, conv_dtype=conv_dtype or activations)
    return StateFacts(model, shape, layers, count, blocks)


def _divided(whole: _Whole, ranks: int) -> tuple[StateShape, tuple[tuple[str, int], ...]]:
    """Return the shape of one rank, and the parts of its window rows."""
    if not _divides(whole, ranks):
        limit = f"it must divide the model's {whole.heads} heads and {whole.key_heads} key heads"
        if whole.groups:
            limit = f"it must divide the model's {whole.heads} heads, and divide its {whole.key_heads} groups or be a "
            limit += "multiple of them"
        fitting = ", ".join(str(count) for count in range(1, 65) if _divides(whole, count))
        raise GeometryError("ranks", ranks, limit, f"use one of {fitting}")
    heads = whole.heads // ranks
    key_heads = max(1, whole.key_heads // ranks)  # with more ranks than groups, each rank has a copy of one group
    keys, values = key_heads * whole.key_dim, heads * whole.value_dim
    sizes = {"q": keys, "k": keys, "v": values, "x": values, "B": keys, "C": keys}
    blocks = tuple((part, sizes[part]) for part in whole.parts)
    if whole.recurrence is Recurrence.NONE:
        channels, heads, key_heads = heads, 0, 0
        blocks = (("x", channels),)
    else:
        channels = sum(size for _, size in blocks)
    kernel = whole.kernel if channels else 0
    shape = StateShape(
        whole.recurrence, whole.gate, heads, key_heads, whole.key_dim, whole.value_dim, channels, kernel, "bfloat16",
        conv_silu=whole.silu,
    )  # fmt: skip
    return shape, blocks


def _divides(whole: _Whole, ranks: int) -> bool:
    """Return true if `ranks` ranks can divide a layer; groups may also be copied."""
    copied = whole.groups and ranks % whole.key_heads == 0
    return whole.heads % ranks == 0 and (copied or whole.key_heads % ranks == 0)


# -- families ---------------------------------------------------------------------------------------------


def _gated_deltanet(c: object) -> _Whole:
    names = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
    heads, key_heads, key_dim, value_dim = (integer_of(c, name, 1) for name in names)
    kernel = integer_of(c, "linear_conv_kernel_dim", 2)
    return _Whole(Recurrence.DELTA, Gate.HEAD, heads, key_heads, key_dim, value_dim, kernel, "qkv")


def _kda(c: object) -> _Whole:
    nested = field_of(c, "linear_attn_config")
    if nested is None:  # names of transformers
        heads, dim, kernel = (
            integer_of(c, name, 1) for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        )
    else:  # names of Moonshot's config.json
        heads, dim, kernel = (
            integer_of(nested, name, 1) for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
    return _Whole(Recurrence.DELTA, Gate.KEY, heads, heads, dim, dim, kernel, "qkv")


def _mamba2(heads: str, dim: str, state: str, groups: str, kernel: str) -> Callable[[object], _Whole]:
    """Return the reader of a Mamba2 family with these field names."""

    def read(c: object) -> _Whole:
        count = integer_of(c, heads, 1)
        width = field_of(c, dim)
        if width in (None, "auto"):
            width = integer_of(c, "mamba_expand", 1) * integer_of(c, "hidden_size", 1) // count
        elif type(width) is not int or width < 1:
            raise GeometryError(f"config.{dim}", width, "it must be an integer of 1 or more", USE)
        key_dim, key_heads = integer_of(c, state, 1), integer_of(c, groups, 1)
        taps = integer_of(c, kernel, 2)
        return _Whole(Recurrence.DECAY, Gate.HEAD, count, key_heads, key_dim, width, taps, "xBC", groups=True)

    return read


def _mamba1(c: object) -> _Whole:
    channels = integer_of(c, "mamba_expand", 1) * integer_of(c, "hidden_size", 1)
    state, kernel = integer_of(c, "mamba_d_state", 1), integer_of(c, "mamba_d_conv", 2)
    return _Whole(Recurrence.DECAY, Gate.KEY, channels, 1, state, 1, kernel, "x", groups=True)


def _lightning(c: object) -> _Whole:
    heads = integer_of(c, "num_attention_heads", 1)
    dim = field_of(c, "head_dim")
    dim = integer_of(c, "hidden_size", 1) // heads if dim is None else integer_of(c, "head_dim", 1)
    return _Whole(Recurrence.DECAY, Gate.CONSTANT, heads, heads, dim, dim, 0)


def _bailing(c: object) -> _Whole:
    """Ling 3 has KDA; Ring and Ling 2.5 have Lightning attention in the same model_type."""
    return _lightning(c) if field_of(c, "linear_num_heads") is None else _kda(c)


def _short_convolution(c: object) -> _Whole:
    channels = integer_of(c, "hidden_size", 1)
    return _Whole(Recurrence.NONE, Gate.HEAD, channels, channels, 0, 0, integer_of(c, "conv_L_cache", 2), silu=False)


_MAMBA = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
FAMILIES: dict[str, Callable[[object], _Whole]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"), _gated_deltanet
    ),
    "kimi_linear": _kda,
    "nemotron_h": _mamba2("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "bamba"), _MAMBA),
    "zamba2": _mamba2("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
    "mamba2": _mamba2("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
    "jamba": _mamba1,
    **dict.fromkeys(("minimax", "minimax_text_01"), _lightning),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), _bailing),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_convolution),
}
"""Reader of each family's layer, by model_type."""
STATEFUL = frozenset({"linear_attention", "mamba", "mamba2", "conv", "hybrid", "recurrent", "kda", "M"})
"""Names of layers with state in a configuration's list of layer types."""
EVERY_LAYER = frozenset({"mamba2", "falcon_h1", "zamba2"})
"""Models in which every layer has state, also a layer with attention."""


def _layers(c: object) -> tuple[tuple[int, ...], int]:
    """Return the indices of the layers with state, and the number of layers."""
    types = _layer_types(c)
    return tuple(i for i, kind in enumerate(types) if kind in STATEFUL), len(types)


def _layer_types(c: object) -> Sequence[str]:
    """Return the type of each layer: a list, a pattern, or the rule of the family."""
    model = str(field_of(c, "model_type"))
    pattern = field_of(c, "hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern
    for name in ("layers_block_type", "layer_types", "attn_type_list"):
        found = field_of(c, name)
        if isinstance(found, (list, tuple)) and found and model not in EVERY_LAYER:
            return [one if isinstance(one, str) else ("linear_attention", "attention")[one] for one in found]
    count = integer_of(c, "num_hidden_layers", 1)
    if model in EVERY_LAYER:
        return ["mamba"] * count
    if (nested := field_of(c, "linear_attn_config")) is not None:
        one_based = field_of(nested, "kda_layers") or ()
        return ["kda" if i + 1 in one_based else "attention" for i in range(count)]
    if (attention := field_of(c, "attn_layer_indices")) is not None:
        return ["attention" if i in attention else "mamba" for i in range(count)]
    if (period := field_of(c, "attn_layer_period")) is not None:
        offset = integer_of(c, "attn_layer_offset", 0)
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    for name in ("full_attention_interval", "layer_group_size"):
        if field_of(c, name) is not None:
            every = integer_of(c, name, 1)
            return ["attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    if model in ("bamba", "granitemoehybrid"):
        return ["mamba"] * count
    limit = "the configuration does not say which layers have state"
    raise GeometryError("config.layer_types", None, limit, USE)


def _dtype(c: object, *names: str) -> str | None:
    """Return a dtype's name, from a string or a torch.dtype."""
    found = next((value for name in names if (value := field_of(c, name)) is not None), None)
    return None if found is None else str(found).removeprefix("torch.")
