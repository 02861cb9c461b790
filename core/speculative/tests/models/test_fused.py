"""The fused forward: supported models, equal results, shared weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from draftmark_speculative.models import CausalLM, wrap_model
from draftmark_speculative.models.attention import checked
from draftmark_speculative.models.causal_lm import packed_forward
from draftmark_speculative.models.fused import FusedDecoder
from draftmark_speculative.models.probe import ProbeAttention
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model

TOKENS, POSITIONS = torch.arange(8) * 31 + 5, torch.arange(4).repeat(2)
BIASES = {"attention_bias": True, "mlp_bias": True}


class Answering:
    """`AttentionStep` that computes plain causal attention, as the probe does."""

    def __init__(self, model: CausalLM) -> None:
        self._run, self._layers = ProbeAttention(), model.layers

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.is_contiguous() and k.is_contiguous()
        return self._run(layer, self._layers[layer], q, k, v)


def _randomise_biases_and_norms(hf: Any) -> Any:
    """Randomise biases and norms: transformers starts them at 0 and 1, where a mistake would not show."""
    torch.manual_seed(5)
    for parameter in hf.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(0.5)
    return hf


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("llama", BIASES), ("qwen2", {}), ("mistral", {"sliding_window": None}),
     ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}})],
)  # fmt: skip
def test_fused_forward_equals_transformers(family: str, overrides: dict[str, Any]) -> None:
    """The fused forward computes the logits and hidden states of transformers' own modules."""
    hf = _randomise_biases_and_norms(tiny_hf_model(family, **overrides))
    theirs = copy.deepcopy(hf)
    model = wrap_model(hf)
    assert model._fused is not None
    want = packed_forward(theirs, TOKENS, POSITIONS, ProbeAttention())
    every = tuple(range(len(model.layers) + 1))
    logits, features = model.forward_features(TOKENS, POSITIONS, Answering(model), model.tap(every))
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.forward(TOKENS, POSITIONS, Answering(model), torch.tensor([6, 1])), want[[6, 1]],
                               rtol=1e-4, atol=1e-4)  # fmt: skip
    taps = model.tap(every)
    with taps.listening():
        packed_forward(hf, TOKENS, POSITIONS, checked(Answering(model), model.layers))
    torch.testing.assert_close(features, taps.take(), rtol=1e-4, atol=1e-4)


def _hook(hf: Any) -> None:
    hf.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


def _adapter(hf: Any) -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    old = hf.model.layers[1].mlp.up_proj
    hf.model.layers[1].mlp.up_proj = Adapted(old.in_features, old.out_features, bias=False)


def _gelu(hf: Any) -> None:
    hf.config.hidden_act = "gelu"
    for layer in hf.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


@pytest.mark.parametrize("change", [_hook, _adapter, _gelu])
def test_modified_model_runs_through_transformers(change: Any) -> None:
    """A model with hooks, adapters or another activation runs through transformers' modules."""
    hf = tiny_hf_model("llama")
    change(hf)
    model = wrap_model(hf)
    assert model._fused is None
    want = packed_forward(hf, TOKENS, POSITIONS, ProbeAttention())
    assert torch.equal(model.forward(TOKENS, POSITIONS, Answering(model)), want)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3", "phi3", "mistral"])
def test_other_families_run_through_transformers(family: str) -> None:
    """Families with other layers or with windows have no fused forward."""
    assert tiny_model(family)._fused is None


def test_fused_forward_with_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused forward with different logits is not used, although the class is supported."""
    own = FusedDecoder.__call__
    monkeypatch.setattr(FusedDecoder, "__call__", lambda *args: (own(*args)[0] * 1.1, []))
    assert tiny_model("llama")._fused is None


def test_packed_weights_share_storage_with_the_model() -> None:
    """transformers' parameters are views of the packed weights: both forwards see a write to one."""
    model = tiny_model("llama")
    attention = model.hf.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    before = model.forward(TOKENS, POSITIONS, Answering(model))
    attention.v_proj.weight.data.mul_(2)
    after = model.forward(TOKENS, POSITIONS, Answering(model))
    assert not torch.allclose(before, after)
    want = packed_forward(model.hf, TOKENS, POSITIONS, ProbeAttention())
    torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_return_float32_logits(dtype: str) -> None:
    """Wrapped half-precision models return float32 logits, for all rows and for chosen rows."""
    model = tiny_model("gemma2", dtype=dtype)
    assert model.dtype is getattr(torch, dtype)
    assert model.layers == tiny_model("gemma2").layers
    logits = model.forward(TOKENS, POSITIONS, Answering(model))
    assert logits.dtype == torch.float32
    some = model.forward(TOKENS, POSITIONS, Answering(model), torch.tensor([6, 1]))
    torch.testing.assert_close(some, logits[[6, 1]], rtol=1e-2, atol=1e-2)
