"""Tests of model families other than Llama: draftmark and another attention backend generate equal tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from any_model import any_model, use_random_weights
from dense import use_dense_attention
from scheduler import generate, in_a_fork
from short_convolutions import use_short_convolutions

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20, [10, 20, 30, 40, 50, 60] * 5]
TOKENS = 20
TREE = dict(speculative_eagle_topk=4, speculative_num_steps=3, speculative_num_draft_tokens=10)


def _generate(*before: Any, **arguments: Any) -> dict[str, Any]:
    for one in (use_random_weights, *before):
        one()
    return generate(PROMPTS, TOKENS, load_format="dummy", **arguments)


def test_attention_sinks(folder: Path) -> None:
    """gpt-oss, which has sinks and a second KV pool for windows, generates the same tokens as with dense attention.

    The draft model is a gpt-oss too, and its trees use pages of 16. SGLang's list of backends for gpt-oss lacks
    draftmark, so the test also needs the hook on that list.
    """
    experts = dict(num_local_experts=4, num_experts_per_tok=2, swiglu_limit=7.0, attention_bias=True, head_dim=16)
    layers = dict(sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    path = any_model(folder / "gpt_oss", "GptOssForCausalLM", "gpt_oss", **experts, **layers)
    plain = in_a_fork(_generate, use_dense_attention, model_path=path, attention_backend="triton")
    drafts = dict(TREE, speculative_algorithm="STANDALONE", speculative_draft_model_path=path)
    made = in_a_fork(_generate, model_path=path, attention_backend="draftmark", page_size=16, **drafts)
    assert made["backend"] == "DraftmarkBackend" and made["windows"] == [-1, 8]
    assert made["texts"] == plain["texts"]
    assert len(PROMPTS) * TOKENS - made["verifies"] >= 20, "drafts were not accepted"


def test_convolution_layers(folder: Path) -> None:
    """LFM2, for which SGLang wraps backend and KV pool, generates the same tokens as with SGLang's own attention."""
    convolutions = dict(conv_L_cache=3, conv_bias=False, block_ff_dim=128, block_dim=64, block_multiple_of=8)
    more = dict(block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, layer_types=["conv", "full_attention"])
    path = any_model(folder / "lfm2", "Lfm2ForCausalLM", "lfm2", **convolutions, **more)
    served = dict(model_path=path, disable_radix_cache=True, mamba_radix_cache_strategy="no_buffer")
    plain = in_a_fork(_generate, use_short_convolutions, attention_backend="torch_native", **served)
    made = in_a_fork(_generate, use_short_convolutions, attention_backend="draftmark", page_size=16, **served)
    assert made["backend"] == "DraftmarkBackend" and made["texts"] == plain["texts"]


def test_transformers_model(folder: Path) -> None:
    """A model that runs transformers' code generates the right tokens, although its attention layers lack a scale."""
    scale = dict(attention_multiplier=0.4, logits_scaling=1.0, residual_multiplier=1.0, embedding_multiplier=1.0)
    path = any_model(folder / "granite", "GraniteForCausalLM", "granite", **scale)
    served = dict(model_path=path, model_impl="transformers")
    plain = in_a_fork(_generate, attention_backend="torch_native", **served)
    made = in_a_fork(_generate, attention_backend="draftmark", page_size=16, **served)
    assert made["backend"] == "DraftmarkBackend" and made["texts"] == plain["texts"]
