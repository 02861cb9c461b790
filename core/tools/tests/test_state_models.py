"""Tests of the recurrent layers that are read from a model's configuration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from draftmark import Gate, GeometryError, Limits, Recurrence, StateGeometry
from draftmark_tools.models import state_facts, state_shape

GDN = {
    "num_hidden_layers": 8, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_value_heads": 32,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
MAMBA2 = {
    "num_hidden_layers": 4, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "hidden_size": 4096, "mamba_expand": 2,
}  # fmt: skip
KDA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
DELTA, DECAY, NONE = Recurrence
HEAD, KEY, CONSTANT = Gate

CONFIGS = {
    "qwen3_next": (GDN, (DELTA, HEAD, 32, 16, 128, 128, 8192, 4), (0, 1, 2, 4, 5, 6), "qkv"),
    "qwen3_5": (
        {"text_config": {**GDN, "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}},
        (DELTA, HEAD, 32, 16, 128, 128, 8192, 4), (0,), "qkv",
    ),
    "olmo_hybrid": (
        GDN | {"linear_num_value_heads": 30, "linear_num_key_heads": 30, "linear_key_head_dim": 96,
               "linear_value_head_dim": 192, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        (DELTA, HEAD, 30, 30, 96, 192, 11520, 4), (0, 1, 2), "qkv",
    ),
    "kimi_linear": (
        {"num_hidden_layers": 4, "linear_attn_config": KDA}, (DELTA, KEY, 32, 32, 128, 128, 12288, 4), (0, 1, 2), "qkv",
    ),
    "nemotron_h": (
        {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
         "hybrid_override_pattern": "M-M*E"},
        (DECAY, HEAD, 128, 8, 128, 64, 10240, 4), (0, 2), "xBC",
    ),
    "falcon_h1": (MAMBA2, (DECAY, HEAD, 128, 1, 128, 64, 8448, 4), (0, 1, 2, 3), "xBC"),
    "granitemoehybrid": (
        MAMBA2 | {"layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_d_head": "auto"},
        (DECAY, HEAD, 128, 1, 128, 64, 8448, 4), (0, 1, 3), "xBC",
    ),
    "bamba": (MAMBA2 | {"attn_layer_indices": [1]}, (DECAY, HEAD, 128, 1, 128, 64, 8448, 4), (0, 2, 3), "xBC"),
    "zamba2": (
        {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8,
         "mamba_headdim": 640, "mamba_d_state": 64, "mamba_ngroups": 1, "mamba_d_conv": 4},
        (DECAY, HEAD, 8, 1, 64, 640, 5248, 4), (0, 1, 2), "xBC",
    ),
    "mamba2": (
        {"num_hidden_layers": 2, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
        (DECAY, HEAD, 128, 8, 128, 64, 10240, 4), (0, 1), "xBC",
    ),
    "jamba": (
        {"num_hidden_layers": 8, "hidden_size": 4096, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
         "attn_layer_period": 8, "attn_layer_offset": 4},
        (DECAY, KEY, 8192, 1, 16, 1, 8192, 4), (0, 1, 2, 3, 5, 6, 7), "x",
    ),
    "minimax": (
        {"num_attention_heads": 64, "head_dim": 128, "attn_type_list": [0, 0, 1]},
        (DECAY, CONSTANT, 64, 64, 128, 128, 0, 0), (0, 1), "",
    ),
    "bailing_moe_linear": (
        {"num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 128, "layer_group_size": 4},
        (DECAY, CONSTANT, 16, 16, 128, 128, 0, 0), (0, 1, 2), "",
    ),
    "lfm2": (
        {"hidden_size": 2048, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]},
        (NONE, HEAD, 0, 0, 0, 0, 2048, 3), (0, 2), "x",
    ),
}  # fmt: skip
"""By model_type: configuration, leading fields of the shape, layers with state, parts of a window row."""


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_each_family_is_read(model, kind) -> None:
    """Shape, layers and parts follow from a configuration, as a mapping and as an object."""
    fields, shape, layers, parts = CONFIGS[model]
    fields = {"model_type": model, **fields}
    if kind is SimpleNamespace and "text_config" in fields:
        fields["text_config"] = SimpleNamespace(**fields["text_config"])
    facts = state_facts(kind(**fields))
    s = facts.shape
    got = (s.recurrence, s.gate, s.num_heads, s.num_key_heads, s.key_dim, s.value_dim, s.conv_channels, s.conv_kernel)
    assert got == shape
    assert facts.layers == layers
    assert "".join(name for name, _ in facts.conv_blocks) == parts
    assert sum(size for _, size in facts.conv_blocks) == s.conv_channels
    assert s.conv_silu is (model != "lfm2")
    geometry = StateGeometry.create(s, Limits(1, 16), num_layers=len(layers))
    facts.check(geometry)
    with pytest.raises(GeometryError, match="value_dim"):
        facts.check(replace(geometry, state=replace(s, value_dim=s.value_dim + 1)))
    with pytest.raises(GeometryError, match="num_layers"):
        facts.check(replace(geometry, num_layers=len(layers) + 1))


def test_ranks_divide_heads_and_channels() -> None:
    """The shares of all ranks add up to the model, except groups that each rank copies."""
    config = {"model_type": "qwen3_next", **GDN}
    whole, share = state_shape(config), state_shape(config, 4)
    assert (share.num_heads, share.num_key_heads, share.conv_channels) == (8, 4, 2048)
    assert (share.key_dim, share.value_dim) == (whole.key_dim, whole.value_dim)
    mamba = {"model_type": "bamba", **MAMBA2, "attn_layer_indices": []}
    assert state_shape(mamba, 8).num_key_heads == 1
    assert state_shape(mamba, 8).conv_channels == 128 * 64 // 8 + 2 * 128


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        ({"model_type": "qwen3_next", **GDN}, 32, "16 key heads"),
        ({"model_type": "qwen3_next", **GDN}, 64, "32 heads"),
        ({"model_type": "bamba", **MAMBA2, "attn_layer_indices": [], "mamba_n_groups": 3}, 8, "3 groups"),
        ({"model_type": "bamba", **MAMBA2, "attn_layer_indices": [], "mamba_n_groups": 8}, 16, None),
        ({"model_type": "qwen3_next", **GDN}, 0, "ranks is 0"),
        ({"model_type": "llama"}, 1, "llama"),
        ({"model_type": "qwen3_next", **GDN, "full_attention_interval": 1}, 1, "name none with"),
        ({"model_type": "qwen3_next", **GDN, "linear_num_key_heads": None}, 1, "linear_num_key_heads"),
        ({"model_type": "qwen3_next", **GDN, "full_attention_interval": None}, 1, "layer_types"),
        ({"model_type": "granitemoehybrid", **MAMBA2, "mamba_d_head": 0}, 1, "mamba_d_head"),
    ],
)
def test_ranks_and_fields_that_do_not_fit_are_refused(config, ranks, words) -> None:
    """Ranks that split a head or a group, and absent fields, are refused by name (vllm#55091)."""
    if words is None:
        assert state_shape(config, ranks).num_key_heads == 1
        return
    with pytest.raises(GeometryError, match=words):
        state_shape(config, ranks)


def test_dtypes_come_from_the_configuration() -> None:
    """The state is float32 unless mamba_ssm_dtype says otherwise; the window has the activations' dtype."""
    config = {"model_type": "qwen3_next", **GDN}
    assert [getattr(state_shape(config), name) for name in ("dtype", "state_dtype", "conv_dtype")] == [
        "bfloat16", "float32", "bfloat16",
    ]  # fmt: skip
    shape = state_shape(config | {"torch_dtype": "float16", "mamba_ssm_dtype": "bfloat16"})
    assert (shape.dtype, shape.state_dtype, shape.conv_dtype) == ("float16", "bfloat16", "float16")
    shape = state_shape(config, dtype="float32", state_dtype="float64", conv_dtype="bfloat16")
    assert (shape.dtype, shape.state_dtype, shape.conv_dtype) == ("float32", "float64", "bfloat16")
