"""What vLLM's own predicates say of a model that is not served, before anything is allocated; needs vLLM."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention import backend as theirs

from draftmark_engines import EngineError
from draftmark_vllm import builder, impl
from draftmark_vllm.backend import DraftmarkBackend
from draftmark_vllm.versions import VLLM

USUAL = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": "decoder",
}


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A model of 8 heads, served by the reference."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 8, get_num_kv_heads=lambda parallel: 2, max_model_len=256
    )
    made = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, block_size=None),
        parallel_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        additional_config={"draftmark": {"backend": "reference"}},
    )
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: made)
    monkeypatch.setattr(impl, "get_current_vllm_config", lambda: made)
    return made


def test_a_usual_model_is_served() -> None:
    """Nothing is said against it."""
    assert not DraftmarkBackend.validate_configuration(**USUAL)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"use_dcp": True}, "DCP"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_adaptive_verification": True}, "adaptive verification"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"block_size": 24}, "block_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "the reference stores KV as float32"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_is_not_served_is_refused_by_the_predicates(asked: dict[str, Any], said: str) -> None:
    """One sentence each, of vLLM's or of the backend that serves; not every release asks everything."""
    if not set(asked) <= set(inspect.signature(DraftmarkBackend.validate_configuration).parameters):
        pytest.skip(f"this vLLM does not ask about {', '.join(asked)}")
    if asked == {"use_dcp": True} and not hasattr(theirs.AttentionBackend, "supports_dcp"):
        pytest.skip("this vLLM asks about DCP for MLA alone")
    reasons = DraftmarkBackend.validate_configuration(**{**USUAL, **asked})
    assert any(said in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("part", "option", "said"),
    [
        ("cache_config", {"kv_sharing_fast_prefill": True}, "leave --kv-sharing-fast-prefill out"),
        ("model_config", {"rswa_window": 128}, "R-SWA is not served: .*use another backend"),
        (
            "parallel_config",
            {"decode_context_parallel_size": 2},
            "DCP .* is 2; leave --decode-context-parallel-size out",
        ),
        (
            "parallel_config",
            {"prefill_context_parallel_size": 4},
            "PCP .* is 4; leave --prefill-context-parallel-size out",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_an_option_is_refused_in_every_release(
    config: SimpleNamespace, part: str, option: dict[str, Any], said: str
) -> None:
    """With the way out, whether vLLM asks about it or not."""
    vars(getattr(config, part)).update(option)
    assert any(re.search(said, one) for one in DraftmarkBackend.validate_configuration(**USUAL))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"alibi_slopes": [0.5] * 8}, "the model has ALiBi slopes"),
        ({"attn_type": "encoder"}, "attention of type encoder is not served"),
        ({"use_irope": True}, "the layer has use_irope"),
    ],
)
def test_a_layer_with_more_is_refused(layer: dict[str, Any], said: str) -> None:
    """As vLLM builds it, which is before it loads weights."""
    with pytest.raises(EngineError, match=said):
        impl.DraftmarkImpl(8, 64, 0.125, 2, **layer)


def test_a_layer_is_asked_about_as_it_is(config: SimpleNamespace) -> None:
    """Layers may differ from the model's usual one, and weights are not loaded yet."""
    with pytest.raises(EngineError, match="the reference stores KV as"):
        impl.DraftmarkImpl(8, 64, 0.125, 2, kv_cache_dtype="fp8")


@pytest.mark.parametrize("kind", ["EncoderOnlyAttention_", "StaticSink_", "FastPrefill_", "Another"])
def test_layers_whose_steps_vllm_changes_are_refused(kind: str) -> None:
    """vLLM wraps a backend for layers of other masks, without asking it, as it builds such a layer."""
    with pytest.raises(EngineError, match=f"kind {kind.strip('_')}, which is not served; use another backend"):
        theirs.subclass_attention_backend(kind, DraftmarkBackend, DraftmarkBackend.get_builder_cls())


def test_layers_of_chunks_are_not_refused() -> None:
    """Their steps are usual ones of more requests."""
    theirs.subclass_attention_backend("ChunkedLocalAttention_8192_", DraftmarkBackend, builder.DraftmarkBuilder)


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])], ids=["none", "some"])
def test_a_step_that_sees_ahead_is_refused(causal: object) -> None:
    """Whoever asks for it: nothing is served that would be wrong."""
    with pytest.raises(EngineError, match="attention that is not causal, which is not served"):
        builder._step(SimpleNamespace(causal=causal), without_lengths=True, exact=False)


def test_k_and_v_have_heads_of_one_size() -> None:
    """vLLM tells the layer's spec alone."""
    with pytest.raises(EngineError, match="heads of K have 64 elements and those of V 32"):
        DraftmarkBackend.customize_spec(SimpleNamespace(head_size=64, head_size_v=32))


@pytest.mark.parametrize(("version", "refused"), [("0.28.1", True), ("0.29.0", False)])
def test_sleep_needs_a_vllm_that_keeps_what_backends_keep(
    config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    """To 0.28 the builders' memory is part of what is thrown away with KV."""
    monkeypatch.setattr(type(VLLM), "installed", lambda self: ("vllm", version))
    config.model_config.enable_sleep_mode = True
    assert any("--enable-sleep-mode" in one for one in DraftmarkBackend.validate_configuration(**USUAL)) is refused


def test_no_context_parallelism() -> None:
    """vLLM asks a layer's implementation whether it gives the log-sum-exp that ranks would merge by."""
    assert not impl.DraftmarkImpl.can_return_lse_for_decode
