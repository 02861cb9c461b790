"""Tests of the start-up checks: unsupported settings, models and KV pools are rejected with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftmark_engines import EngineError
from draftmark_sglang.options import Ancestors, Options
from draftmark_sglang.refusals import (
    ARGUMENTS,
    STATE_ARGUMENTS,
    argument_reasons,
    chunk_reasons,
    layer_reasons,
    pool_reasons,
    refuse,
    state_reasons,
)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    """Each rejected server argument gives an error with its name and reason."""
    assert argument_reasons(SimpleNamespace(**{name: True})) == [f"--{name.replace('_', '-')}: {ARGUMENTS[name]}"]


def test_algorithms_and_graphs() -> None:
    """Unsupported speculative algorithms, context parallelism and full CUDA graphs of prefill are rejected."""
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    parts = dict(dcp_size=2, attn_cp_size=2)
    found = argument_reasons(SimpleNamespace(speculative_algorithm="DFLASH", cuda_graph_config=graphs, **parts))
    assert [one.split(":")[0] for one in found] == [
        "--dcp-size",
        "--attn-cp-size",
        "--speculative-algorithm DFLASH",
        "--cuda-graph-backend-prefill full",
    ]


def test_supported_arguments_have_no_reasons() -> None:
    """Supported arguments give no reasons. DP attention is rejected together with n-gram trees, else accepted."""
    assert argument_reasons(SimpleNamespace(speculative_algorithm="EAGLE3", dcp_size=1)) == []
    assert argument_reasons(SimpleNamespace(speculative_algorithm="EAGLE3", enable_dp_attention=True)) == []
    found = argument_reasons(SimpleNamespace(speculative_algorithm="NGRAM", enable_dp_attention=True))
    assert [one.split(":")[0] for one in found] == ["--enable-dp-attention"]


def test_torch_compile_on_a_cpu() -> None:
    """`--enable-torch-compile` is rejected on a CPU, where SGLang supports it for its own backend only."""
    found = argument_reasons(SimpleNamespace(enable_torch_compile=True, device="cpu"))
    assert [one.split(":")[0] for one in found] == ["--enable-torch-compile"]
    assert argument_reasons(SimpleNamespace(enable_torch_compile=True, device="cuda")) == []


@pytest.mark.parametrize("name", STATE_ARGUMENTS)
def test_arguments_with_recurrent_layers(name: str) -> None:
    """Arguments that do not fit draftmark's backend of recurrent layers are rejected only together with such layers."""
    given = SimpleNamespace(**{name: True})
    assert [one.split(":")[0] for one in state_reasons(given)] == [f"--{name.replace('_', '-')}"]
    assert argument_reasons(given) == []


def test_disaggregation_with_recurrent_layers() -> None:
    """Disaggregated servers are rejected with recurrent layers."""
    found = state_reasons(SimpleNamespace(disaggregation_mode="decode"))
    assert [one.split(":")[0] for one in found] == ["--disaggregation-mode decode"]
    assert state_reasons(SimpleNamespace(disaggregation_mode="null")) == []


@pytest.mark.parametrize(("chunk", "context", "refused"), [(16, 17, True), (16, 16, False), (None, 256, False)])
def test_attention_in_chunks(chunk: int | None, context: int, refused: bool) -> None:
    """Llama-4's chunked attention is rejected if requests may be longer than one chunk."""
    config = SimpleNamespace(attention_chunk_size=chunk, context_len=context)
    assert bool(chunk_reasons(config, [SimpleNamespace(use_irope=True)])) == refused
    assert chunk_reasons(config, [SimpleNamespace(use_irope=False)]) == []


def _layer(**other: Any) -> Any:
    usual = dict(is_cross_attention=False, attn_type="decoder", head_dim=64, v_head_dim=64, qk_head_dim=64)
    return SimpleNamespace(**(usual | dict(logit_cap=0.0) | other))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dict(is_cross_attention=True), "cross attention"),
        (dict(attn_type="encoder_only"), "attention of type encoder_only"),
        (dict(v_head_dim=128), "head_dim is 64 for keys and 128 for values"),
        (dict(xai_temperature_len=8), "xai_temperature_len"),
        (dict(logit_cap=30.0, logit_capping_method="sigmoid"), "logit_capping_method sigmoid"),
    ],
)
def test_layers(other: dict[str, Any], reason: str) -> None:
    """Layers with features that draftmark lacks are rejected with a reason."""
    assert layer_reasons(_layer()) == []
    assert [reason in one for one in layer_reasons(_layer(**other))] == [True]


def test_pools() -> None:
    """Unsupported KV pool classes, layouts and dtypes are rejected with a reason."""

    class BaseSWAKVPool: ...

    class SWAKVPool(BaseSWAKVPool):
        def __init__(self, full: Any, windowed: Any) -> None:
            self.full_kv_pool, self.swa_kv_pool = full, windowed

    class MHATokenToKVPool:
        kv_cache_layout, dtype = "nhd", "torch.bfloat16"

    class MLATokenToKVPool:
        dtype = "torch.bfloat16"

    class DSATokenToKVPool(MLATokenToKVPool): ...

    class HybridLinearKVPool:
        def __init__(self, full: Any) -> None:
            self.full_kv_pool = full

    class NoOpMHATokenToKVPool(MHATokenToKVPool): ...

    other = MHATokenToKVPool()
    other.kv_cache_layout = "vectorized_5d"
    narrow = MHATokenToKVPool()
    narrow.dtype = "torch.float8_e5m2"
    assert pool_reasons(MHATokenToKVPool()) == []
    assert pool_reasons(SWAKVPool(MHATokenToKVPool(), MHATokenToKVPool())) == []
    assert pool_reasons(SWAKVPool(MHATokenToKVPool(), other)) == pool_reasons(other)
    assert pool_reasons(HybridLinearKVPool(MHATokenToKVPool())) == []
    assert pool_reasons(MLATokenToKVPool()) == [] == pool_reasons(HybridLinearKVPool(MLATokenToKVPool()))
    assert "DSATokenToKVPool" in pool_reasons(HybridLinearKVPool(DSATokenToKVPool()))[0]
    assert "NoOpMHATokenToKVPool" in pool_reasons(NoOpMHATokenToKVPool())[0]
    assert "BaseSWAKVPool" in pool_reasons(BaseSWAKVPool())[0]
    assert "DSATokenToKVPool" in pool_reasons(DSATokenToKVPool())[0]
    assert "vectorized_5d" in pool_reasons(other)[0] and "float8_e5m2" in pool_reasons(narrow)[0]


def test_arguments_of_a_call() -> None:
    """An argument of an attention call that changes the result raises an error with the layer's number."""
    refuse({"rel_bias": None, "rope": False}, 3)
    with pytest.raises(NotImplementedError, match="layer 3: a relative bias is not supported"):
        refuse({"rel_bias": object()}, 3)
    with pytest.raises(NotImplementedError, match="argument new_thing of an attention call"):
        refuse({"new_thing": 1}, 0)


def test_options() -> None:
    """Environment variables select the backend, and the ancestors that branches attend to."""
    assert Options.read({}) == Options(None, Ancestors.TRUE)
    chosen = Options.read({"DRAFTMARK_BACKEND": "reference", "DRAFTMARK_ANCESTORS": "branch"})
    assert chosen == Options("reference", Ancestors.BRANCH)
    assert Options.read({"DRAFTMARK_STATE_BACKEND": "sglang"}).state_backend == "sglang"
    with pytest.raises(EngineError, match="DRAFTMARK_ANCESTORS is 'some', but must be true or branch"):
        Options.read({"DRAFTMARK_ANCESTORS": "some"})
