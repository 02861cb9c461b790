"""Tests of the models and options that draftmark refuses before it allocates memory. Needs vLLM."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention import backend as theirs

from draftmark import Mode
from draftmark_engines import EngineError
from draftmark_reference import ReferencePlugin
from draftmark_vllm import builder, impl, limits, parts
from draftmark_vllm.backend import DraftmarkBackend
from draftmark_vllm.batch_runs import block_run
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
    """Return the configuration of a model with 8 heads on the reference backend."""
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
    """The backend's predicates accept a usual model."""
    assert not DraftmarkBackend.validate_configuration(**USUAL)


@pytest.mark.parametrize(
    ("arguments", "reason_text"),
    [
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"use_dcp": True}, "DCP"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"block_size": 24}, "block_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "the reference stores KV as float32"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_predicates_refuse_unsupported_models(arguments: dict[str, Any], reason_text: str) -> None:
    """The predicates refuse each unsupported property with a reason that names it."""
    if not set(arguments) <= set(inspect.signature(theirs.AttentionBackend.validate_configuration).parameters):
        pytest.skip(f"this vLLM has no argument {', '.join(arguments)}")
    if arguments == {"use_dcp": True} and not hasattr(theirs.AttentionBackend, "supports_dcp"):
        pytest.skip("this vLLM checks DCP only for MLA")
    reasons = DraftmarkBackend.validate_configuration(**{**USUAL, **arguments})
    assert any(reason_text in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("arguments", "reason_text"),
    [
        ({"kv_cache_dtype": "fp8"}, "fp8 KV of MLA layers is not served; leave --kv-cache-dtype out"),
        ({"head_size": 288}, "head_size not supported"),
        ({"block_size": 24}, "block_size not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_predicates_refuse_unsupported_mla_layers(
    config: SimpleNamespace, arguments: dict[str, Any], reason_text: str
) -> None:
    """The predicates accept a usual MLA layer, and refuse each unsupported property with a reason that names it."""
    config.model_config.hf_text_config = SimpleNamespace(kv_lora_rank=512)
    usual = {**USUAL, "use_mla": True, "head_size": 576}
    assert DraftmarkBackend.validate_configuration(**usual) == []
    reasons = DraftmarkBackend.validate_configuration(**{**usual, **arguments})
    assert any(reason_text in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("part", "option", "reason_text"),
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
    config: SimpleNamespace, part: str, option: dict[str, Any], reason_text: str
) -> None:
    """An unsupported option is refused with a remedy, even by vLLM releases that do not check the option."""
    vars(getattr(config, part)).update(option)
    assert any(re.search(reason_text, one) for one in DraftmarkBackend.validate_configuration(**USUAL))


@pytest.mark.parametrize(
    ("layer", "reason_text"),
    [
        ({"alibi_slopes": [0.5] * 8}, "the model has ALiBi slopes"),
        ({"attn_type": "encoder"}, "attention of type encoder is not served"),
        ({"use_irope": True}, "the layer has use_irope"),
    ],
)
def test_layer_with_unsupported_arguments_is_refused(layer: dict[str, Any], reason_text: str) -> None:
    """The constructor refuses a layer with unsupported arguments. vLLM creates layers before it loads weights."""
    with pytest.raises(EngineError, match=reason_text):
        impl.DraftmarkImpl(8, 64, 0.125, 2, **layer)


def test_constructor_checks_the_layers_own_dtype(config: SimpleNamespace) -> None:
    """The constructor refuses a layer with an unsupported KV dtype, which can differ from the other layers' dtype."""
    with pytest.raises(EngineError, match="the reference stores KV as"):
        impl.DraftmarkImpl(8, 64, 0.125, 2, kv_cache_dtype="fp8")


@pytest.mark.parametrize("kind", ["EncoderOnlyAttention_", "StaticSink_", "FastPrefill_", "Another"])
def test_special_kinds_of_layers_are_refused(kind: str) -> None:
    """Subclasses that vLLM derives for layers with other masks are refused, because no predicate rejects them."""
    with pytest.raises(EngineError, match=f"kind {kind.strip('_')}, which is not served; use another backend"):
        theirs.subclass_attention_backend(kind, DraftmarkBackend, DraftmarkBackend.get_builder_cls())


def test_chunked_layers_are_accepted() -> None:
    """Layers with chunked attention are accepted, because they only split requests into more requests."""
    theirs.subclass_attention_backend("ChunkedLocalAttention_8192_", DraftmarkBackend, builder.DraftmarkBuilder)


def test_partly_causal_step_is_refused() -> None:
    """A step in which the device decides which rows are causal is refused, because its result would be wrong."""
    with pytest.raises(EngineError, match="the device decides which rows of a step are causal, which is not served"):
        parts.step_of(SimpleNamespace(causal=torch.tensor([True, False])), without_lengths=True, exact=False)


@pytest.mark.parametrize(
    ("block", "reason_text"), [(0, "which is not served; use another"), (5, "only blocks of 5 rows")]
)
def test_non_causal_step_without_blocks_is_refused(block: int, reason_text: str) -> None:
    """A step that is not causal is refused if it has other rows than blocks of the drafter."""
    with pytest.raises(
        EngineError, match=rf"requests of \[4, 1\] rows has attention that is not causal, {reason_text}"
    ):
        block_run((0, 4, 5), 5, block)


def test_adaptive_verification_needs_ragged_verify(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive verification is accepted with full graphs of its rows, unless the backend lacks RAGGED_VERIFY."""
    config.speculative_config = SimpleNamespace(num_speculative_tokens=4, enable_adaptive_verification=True)
    assert DraftmarkBackend.validate_configuration(**USUAL) == []
    assert DraftmarkBackend.supports_device_cpu_query_lens_mismatch()
    assert builder.DraftmarkBuilder.get_varlen_cudagraph_max_query_len(config, None) == 5
    even = tuple(mode for mode in ReferencePlugin.info.modes if mode is not Mode.RAGGED_VERIFY)
    monkeypatch.setattr(ReferencePlugin, "info", replace(ReferencePlugin.info, modes=even))
    monkeypatch.setattr(limits, "_chosen", limits._chosen.__wrapped__)  # the loaded backend is cached
    reasons = DraftmarkBackend.validate_configuration(**USUAL)
    assert "backend reference has no RAGGED_VERIFY; leave enable_adaptive_verification out" in reasons
    config.speculative_config = SimpleNamespace(num_speculative_tokens=4)
    assert builder.DraftmarkBuilder.get_varlen_cudagraph_max_query_len(config, None) is None


def test_block_drafter_needs_draft_block(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a block drafter are accepted, unless the backend lacks DRAFT_BLOCK."""
    config.attention_config = SimpleNamespace(use_non_causal=True)
    config.speculative_config = SimpleNamespace(num_speculative_tokens=4)
    usual = {**USUAL, "use_non_causal": True}
    assert DraftmarkBackend.validate_configuration(**usual) == []
    assert impl.DraftmarkImpl(8, 64, 0.125, 2).block
    causal = tuple(mode for mode in ReferencePlugin.info.modes if mode is not Mode.DRAFT_BLOCK)
    monkeypatch.setattr(ReferencePlugin, "info", replace(ReferencePlugin.info, modes=causal))
    monkeypatch.setattr(limits, "_chosen", limits._chosen.__wrapped__)  # the loaded backend is cached
    assert any("draft_block" in reason for reason in DraftmarkBackend.validate_configuration(**usual))


def test_k_and_v_have_heads_of_one_size() -> None:
    """`customize_spec` refuses V heads of another size than K heads. Only the layer's spec has the size of V heads."""
    with pytest.raises(EngineError, match="heads of K have 64 elements and heads of V have 32"):
        DraftmarkBackend.customize_spec(SimpleNamespace(head_size=64, head_size_v=32))


@pytest.mark.parametrize(("version", "refused"), [("0.28.1", True), ("0.29.0", False)])
def test_sleep_mode_needs_vllm_0_29(
    config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    """Sleep mode is refused up to 0.28, because it discards the builders' memory together with KV."""
    monkeypatch.setattr(type(VLLM), "installed", lambda self: ("vllm", version))
    config.model_config.enable_sleep_mode = True
    assert any("--enable-sleep-mode" in one for one in DraftmarkBackend.validate_configuration(**USUAL)) is refused


def test_no_context_parallelism() -> None:
    """The layer class declares that it returns no log-sum-exp, so vLLM refuses context parallelism."""
    assert not impl.DraftmarkImpl.can_return_lse_for_decode
