"""`latent_shape` against transformers' own attention modules, and against configurations as plain mappings."""

from __future__ import annotations

import importlib
import inspect
import math

import pytest
import torch

from draftmark import AttentionShape, Geometry, GeometryError, Limits
from draftmark_tools.models import latent_shape

MODELS = (
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "glm4_moe_lite",
    "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "youtu",
)  # fmt: skip
"""Models of transformers with latent attention. A release may lack some of them."""
SPARSE = ("axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4")
"""Models with layers that attend to keys of an indexer's choice."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
"""RoPE of DeepSeek V3, without its mscale."""
KIMI_K2 = {
    "model_type": "kimi_k2", "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
"""Attention fields of Kimi K2's config.json."""


def latent_attention(model: str):
    """Return the configuration class and the latent attention class of a model; skip if this release lacks it."""
    package = f"transformers.models.{model}"
    configuration = pytest.importorskip(f"{package}.configuration_{model}", exc_type=ImportError)
    modeling = importlib.import_module(f"{package}.modeling_{model}")
    names = [name for name in dir(modeling) if name.endswith(("Attention", "MLA", "SdpaAttention"))]
    found = [one for one in (getattr(modeling, name) for name in names) if "kv_lora_rank" in inspect.getsource(one)]
    kinds = [one for one in vars(configuration).values() if isinstance(one, type) and hasattr(one, "kv_lora_rank")]
    return kinds[0], found[0]


def one_layer(config):
    """Return the configuration of the first latent layer, if the layers of this configuration differ."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[0]


def module_of(kind, attention):
    """Return the attention module of a configuration, on the meta device."""
    with torch.device("meta"):
        return attention(kind, layer_idx=0)


@pytest.mark.parametrize("model", MODELS)
def test_the_shape_is_that_of_transformers_own_module(model):
    """Row width, value width, heads and scale equal the module's, for the configuration's defaults."""
    kind, attention = latent_attention(model)
    config = one_layer(kind())
    module, shape = module_of(config, attention), latent_shape(config, page_size=64, dense=model in SPARSE)
    assert shape.sinks is hasattr(module, "sinks")
    assert shape.softmax_scale == pytest.approx(module.scaling, rel=1e-12)
    assert shape.head_dim == module.kv_a_proj_with_mqa.out_features
    assert shape.value_width == module.kv_b_proj.in_features == config.kv_lora_rank
    assert (shape.num_qo_heads, shape.num_kv_heads) == (config.num_attention_heads, 1)
    assert Geometry.create(shape, Limits(1, 8)).attention is shape


@pytest.mark.parametrize("mscale", [0.707, 1.0])
@pytest.mark.parametrize(
    "model", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash", "mistral4"]
)
def test_yarn_raises_the_scale_as_in_transformers(model, mscale):
    """YaRN with mscale_all_dim multiplies the scale by mscale twice; without it the scale stays."""
    kind, attention = latent_attention(model)
    plain = kind(rope_parameters=dict(YARN))
    scaled = kind(rope_parameters=YARN | {"mscale": mscale, "mscale_all_dim": mscale})
    for config in (plain, scaled):
        shape = latent_shape(config, page_size=64, dense=model in SPARSE)
        assert shape.softmax_scale == pytest.approx(module_of(config, attention).scaling, rel=1e-12)
    base = latent_shape(plain, page_size=64, dense=model in SPARSE).softmax_scale
    assert latent_shape(scaled, page_size=64, dense=model in SPARSE).softmax_scale == pytest.approx(
        base * (1 + 0.1 * mscale * math.log(40)) ** 2
    )


@pytest.mark.parametrize("model", MODELS)
def test_layers_with_an_indexer_have_lists(model):
    """The keys that an indexer chooses are the width; pools of keys are refused; other models have no lists."""
    config = one_layer(latent_attention(model)[0]())
    if getattr(config, "index_kpool", None) is not None:
        with pytest.raises(GeometryError, match=r"config.index_kpool is .*; pass dense=True, and set chosen_width"):
            latent_shape(config, page_size=64)
        return
    if getattr(config, "sliding_window", None):
        with pytest.raises(GeometryError, match=r"dense=True for the other .*=511 .*, and chosen_width=2048"):
            latent_shape(config, page_size=64)
        return
    shape = latent_shape(config, page_size=64)
    assert shape.window_left == -1 and shape.chosen_width == getattr(config, "index_topk", 0)
    assert bool(shape.chosen_width) is (model in SPARSE)


def test_windows_are_served_or_refused():
    """A window of every layer is the shape's, a window of some layers is refused, and an unused window is ignored."""
    window = KIMI_K2 | {"sliding_window": 128}
    kinds = ["full_attention", "sliding_attention"]
    for config in (window, window | {"layer_types": kinds[1:] * 3}):
        assert latent_shape(config, page_size=64).window_left == 127
    with pytest.raises(
        GeometryError, match=r"sliding_window is 128, but only its layers .*; pass dense=True .*window_left=127"
    ):
        latent_shape(window | {"layer_types": kinds}, page_size=64)
    unused = {"use_sliding_window": False}, {"layer_types": kinds[:1]}, {"sliding_window": None}
    for one in unused:
        assert latent_shape(window | one, page_size=64).window_left == -1


def test_a_plain_mapping_is_enough():
    """config.json as a mapping gives the shape of one rank; Kimi K2 at 8 ranks has 8 heads and scale 0.1309."""
    want = AttentionShape(
        8, 1, 576, 32, softmax_scale=192**-0.5 * (1 + 0.1 * math.log(32)) ** 2, value_dim=512, latent=True
    )
    assert latent_shape(KIMI_K2, ranks=8, page_size=32) == want
    assert want.softmax_scale == pytest.approx(0.13086, abs=1e-5)
    nested = {"model_type": "kimi_k25", "text_config": KIMI_K2, "vision_config": {"num_attention_heads": 16}}
    assert latent_shape(nested, ranks=8, page_size=32) == want
    eight = latent_shape(KIMI_K2, page_size=1, dtype="float16", kv_dtype="float8_e4m3fn")
    assert (eight.num_qo_heads, eight.q_dtype, eight.kv_dtype) == (64, "float16", "float8_e4m3fn")
    assert latent_shape(KIMI_K2, page_size=1, dtype="float16").kv_dtype == "float16"


def test_rows_without_a_rotated_rest():
    """GLM-5.3 has no rotated rest: the row is the value, and no RoPE changes the scale."""
    shape = latent_shape(KIMI_K2 | {"qk_rope_head_dim": 0, "qk_nope_head_dim": 256}, page_size=64)
    assert (shape.head_dim, shape.value_width, shape.softmax_scale) == (512, 512, 256**-0.5)


@pytest.mark.parametrize(
    ("change", "ranks", "field", "words"),
    [
        ({}, 3, "ranks", "an integer that divides the 64 query heads"),
        ({}, 0, "ranks", "an integer that divides the 64 query heads"),
        ({}, "8", "ranks", "is '8', but it must be an integer that divides"),
        ({}, 128, "ranks", "an integer that divides the 64 query heads"),
        (
            {"kv_lora_rank": None},
            1,
            "config",
            "kimi_k2.* no kv_lora_rank, .*; pass a configuration with MLA",
        ),
        ({"kv_lora_rank": 512.0}, 1, "config.kv_lora_rank", "an integer of 1 or more"),
        ({"qk_nope_head_dim": None}, 1, "config.qk_nope_head_dim", "an integer of 1 or more"),
        ({"num_attention_heads": True}, 1, "config.num_attention_heads", "an integer of 1 or more"),
        ({"qk_rope_head_dim": -1}, 1, "config.qk_rope_head_dim", "an integer of 0 or more"),
        ({"rope_scaling": "yarn"}, 1, "config.rope_parameters", "it must be a mapping or None"),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}},
            1,
            "config.rope_parameters.factor",
            "positive number",
        ),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0, "factor": 10**400}},
            1,
            "config.rope_parameters.factor",
            "positive number",
        ),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": "1", "factor": 2}},
            1,
            "config.rope_parameters.mscale_all_dim",
            "positive number",
        ),
        (
            {
                "rope_scaling": {
                    "full": {"type": "yarn", "mscale_all_dim": 1, "factor": 2},
                    "window": {"type": "default"},
                }
            },
            1,
            "config.rope_parameters",
            "its layer types have different mscale factors",
        ),
    ],
)
def test_a_configuration_without_a_usable_field_is_refused(change, ranks, field, words):
    """Each error names the field of the configuration, its value, the limit and the remedy."""
    with pytest.raises(GeometryError, match=words) as caught:
        latent_shape(KIMI_K2 | change, ranks=ranks, page_size=64)
    assert caught.value.field == field


def test_layers_that_differ_are_refused_together():
    """A configuration that raises on a global read is refused with the way to one layer's configuration."""

    class Differs:
        @property
        def kv_lora_rank(self):
            raise RuntimeError("per-layer attribute")

    with pytest.raises(GeometryError, match=r"reading it raised RuntimeError; pass .* config\.per_layer_config\[i\]"):
        latent_shape(Differs(), page_size=64)


def test_short_factors_and_other_rope_leave_the_scale():
    """A factor of 1 or less, a default RoPE, and no mscale_all_dim each give the plain scale."""
    for rope in (None, {}, {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}, {"type": "yarn", "factor": 4.0}):
        assert latent_shape(KIMI_K2 | {"rope_scaling": rope}, page_size=64).softmax_scale == 192**-0.5
    default = {"rope_type": "default", "factor": 4.0, "mscale_all_dim": 1.0}
    assert latent_shape(KIMI_K2 | {"rope_parameters": default}, page_size=64).softmax_scale == 192**-0.5
