"""Models that would run incorrectly are rejected before the first token, by their configuration or by the probe."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from draftmark.errors import ModelError
from draftmark_speculative.models import wrap_model
from draftmark_speculative.models.refusals import refuse
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 128,
    "factor": 2.0,
}

BY_NAME: list[tuple[str, dict[str, Any], str]] = [
    ("llama4_text", {}, "chunked attention"),
    ("deepseek_v3", {"qk_nope_head_dim": 0}, "latent attention has no single shape"),
    ("deepseek_v32", {}, "sparse attention"),
    ("glm_moe_dsa", {}, "sparse attention"),
    ("bailing_hybrid", {}, "linear_attention layers, which keep a state that draftmark does not compute"),
    ("recurrent_gemma", {}, "RG-LRU layers"),
    ("phi3", {"rope_parameters": LONG, "hidden_size": 48, "num_attention_heads": 4}, "longrope RoPE"),
    ("llama", {"rope_parameters": DYNAMIC}, "dynamic RoPE"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": DYNAMIC, "full_attention": DYNAMIC}}, "dynamic RoPE"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "attends both ways"),
    ("bloom", {}, "ALiBi"),
    ("mpt", {}, "ALiBi"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("mamba", {}, "Mamba1 layers"),
    ("falcon_mamba", {}, "Mamba1 layers"),
    ("zamba", {}, "Mamba1 layers"),
    ("mamba2", {}, "no attention layers"),
    ("granitemoehybrid", {}, "no attention layers"),
    ("zamba2", {}, "share one attention block"),
    ("inkling_text", {}, "hybrid, hybrid_sliding layers"),
    ("rwkv", {}, "no attention heads"),
    ("jamba", {}, "Mamba1 layers"),
    ("minimax_m3_vl_text", {}, "sparse attention"),
    ("gemma4_text", {}, "no single attention shape"),
    ("t5", {}, "encoder-decoder"),
    ("llama", {"max_position_embeddings": -5}, "max_position_embeddings -5, but it must be >= 1"),
    ("llama", {"vocab_size": 0}, "vocab_size 0, but it must be >= 1"),
]
"""Family, configuration fields, and a part of the expected error."""


@pytest.mark.parametrize(("family", "fields", "named"), BY_NAME, ids=[f"{f}-{n.split()[0]}" for f, _, n in BY_NAME])
def test_unsupported_configuration_is_rejected(family: str, fields: dict[str, Any], named: str) -> None:
    """An unsupported configuration raises a one-sentence error with family, feature and remedy."""
    try:
        config = AutoConfig.for_model(family, **copy.deepcopy(fields))  # transformers changes it
    except ValueError as error:
        if "Unrecognized model identifier" not in str(error):
            raise
        pytest.skip(f"this transformers has no {family}")
    with pytest.raises(ModelError, match=named) as refused:
        refuse(config, "some-model")
    _assert_one_sentence(str(refused.value), family)


def _assert_one_sentence(message: str, family: str) -> None:
    assert message.startswith(f"model 'some-model' (family {family}) cannot be decoded: "), message
    assert "; use " in message and "\n" not in message


def test_model_is_rejected_before_it_runs() -> None:
    """wrap_model checks the configuration before it runs the model."""
    with pytest.raises(ModelError, match="dynamic RoPE"):
        tiny_model("llama", rope_parameters=DYNAMIC)


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_fixed_frequency_rope_is_supported(kind: str) -> None:
    """RoPE with fixed frequencies is supported: it is right for any mix of requests in a batch."""
    fields = {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    extra = {"linear": {}, "yarn": {"original_max_position_embeddings": 64}, "llama3": fields}[kind]
    tiny_model("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **extra})


# -- unsupported models with a configuration that does not show it ----------------------------------------------


def _refused(hf: Any, named: str, family: str = "llama") -> None:
    with pytest.raises(ModelError, match=named) as refused:
        wrap_model(hf, name="some-model")
    _assert_one_sentence(str(refused.value), family)


def test_sinks_without_a_head_each_are_rejected() -> None:
    """Sinks that are not one logit per query head raise an error with both numbers."""
    hf = tiny_hf_model("gpt_oss")
    hf.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(1))
    _refused(hf, r"sinks \(s_aux\) of shape \[1\], but draftmark serves one logit for each of its 4", "gpt_oss")


def test_rope_that_depends_on_the_batch_is_found() -> None:
    """The probe moves one request to the end of the context and detects that the other request's logits change."""
    rope = {**LONG, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    hf = tiny_hf_model("llama", rope_parameters=rope)
    hf.model.rotary_emb.config = AutoConfig.for_model("llama", rope_parameters=rope, head_dim=16)
    hf.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    _refused(hf, "change by .* with the positions of another request")


def test_attention_that_bypasses_the_registry_is_found() -> None:
    """The probe finds a layer that computes its own attention."""

    class OwnAttention(LlamaAttention):
        def forward(self, hidden_states: Any, **_: Any) -> Any:
            return self.o_proj(self.q_proj(hidden_states)), None

    hf = tiny_hf_model("llama")
    hf.model.layers[1].self_attn.__class__ = OwnAttention
    _refused(hf, "1 attention calls of 1 layers .* the model has 2 layers")


def test_mixing_of_rows_outside_attention_is_found() -> None:
    """The probe detects a shift of tokens (as in recurrent layers) that passes values from one request to the next."""
    hf = tiny_hf_model("llama")
    hf.model.layers[0].mlp.register_forward_hook(lambda _m, _i, out: out + out.roll(1, dims=1))
    _refused(hf, "differ from transformers' own")


def test_a_position_bias_is_found() -> None:
    """The probe finds queries that depend on their row in the batch instead of their position."""
    hf = tiny_hf_model("llama")
    hf.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda _m, _i, out: out + torch.arange(out.shape[1])[None, :, None]
    )
    _refused(hf, "differ from transformers' own")


@pytest.mark.parametrize(
    ("family", "field", "value", "named"),
    [
        ("llama", "sliding_window", 7, "window_left 6 for layer 0.*with -1"),
        ("gemma3_text", "attn_logit_softcapping", 20.0, "logits_soft_cap 20.0 for layer 0.*with 0.0"),
        ("gemma2", "query_pre_attn_scalar", 99, "softmax_scale"),
        ("qwen3", "head_dim", 12, "head_dim 12"),
    ],
)
def test_a_setting_that_never_reaches_attention_is_found(family: str, field: str, value: Any, named: str) -> None:
    """A configured setting that the layer does not pass to the attention function raises an error."""
    hf = tiny_hf_model(family)
    setattr(hf.config, field, value)
    _refused(hf, named, family)


def test_exception_in_the_forward_is_one_sentence() -> None:
    """An exception in a model's forward becomes one sentence."""
    hf = tiny_hf_model("llama")
    hf.model.layers[0].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(TypeError("no such\nkeyword")))
    _refused(hf, re.escape("its forward raised TypeError: no such keyword; use another model"))


def test_rejected_model_is_unchanged() -> None:
    """A rejected model keeps its own attention implementation."""
    hf = tiny_hf_model("llama")
    own = hf.config._attn_implementation
    handle = hf.model.layers[0].mlp.register_forward_hook(lambda _m, _i, out: out + out.roll(1, dims=1))
    with pytest.raises(ModelError):
        wrap_model(hf)
    handle.remove()
    assert hf.config._attn_implementation == own
    wrap_model(hf)
