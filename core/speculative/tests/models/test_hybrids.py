"""Token mixers with recurrent state compute transformers' logits, whole and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.speculative.tests.models.plain_states import PlainRun, PlainStep
from draftmark_speculative.models.causal_lm import packed_forward
from draftmark_speculative.models.latent import absorb
from draftmark_speculative.models.refusals import is_latent
from draftmark_speculative.models.states import HybridLayers
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model
from draftmark_speculative.models.tiny_hybrids import HYBRIDS

NEAR = {"minimax": 1e-5}
"""Tolerance of a family with numbers that stay float32; for other families it is 1e-9."""
PIECES = (7, 1, 1, 5, 1, 1, 8)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in HYBRIDS),
    ("falcon_h1", {"mamba_rms_norm": False}),
    ("falcon_h1", {"mamba_norm_before_gate": True, "projectors_bias": True}),
    ("granitemoehybrid", {"num_local_experts": 4, "intermediate_size": 24, "mamba_conv_bias": False}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "time_step_limit": (0.05, 0.5)}),
    ("nemotron_h", {"use_conv_bias": False, "mamba_proj_bias": True, "time_step_min": 0.05}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": True}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 5}),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 4}),
]


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers' modules compute in float64 where they convert to float32."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def _random(hf: Any) -> Any:
    """Shift vectors (norms, biases, skips, decays), which start at values that would hide a mistake."""
    torch.manual_seed(3)
    for parameter in hf.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return hf


@pytest.mark.parametrize(
    ("family", "overrides"), VARIANTS, ids=[f"{family}-{'-'.join(more) or 'plain'}" for family, more in VARIANTS]
)
def test_mixers_compute_transformers_logits(family: str, overrides: dict[str, Any], exactly: None) -> None:
    """Logits of a prompt in pieces of one and several rows equal transformers' logits of one forward, in float64."""
    hf = _random(tiny_hf_model(family, dtype="float64", **overrides))
    hf.set_experts_implementation("eager")  # the default has no float64
    hybrid = HybridLayers(hf)
    tokens = torch.randint(0, 256, (sum(PIECES),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = hf(input_ids=tokens[None], use_cache=False).logits[0]
    if is_latent(hf.config):
        absorb(hf)
    run, ends = PlainRun(hybrid.shapes), torch.tensor(PIECES).cumsum(0).tolist()
    for count, end in zip(PIECES, ends, strict=True):
        rows = torch.arange(end - count, end)
        with hybrid.running(run):
            got = packed_forward(hf, tokens[rows], rows, run)
        torch.testing.assert_close(got, own[rows], rtol=0, atol=NEAR.get(family, 1e-9), msg=f"rows {rows.tolist()}")


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2", "kimi_linear"])
def test_features_are_transformers_hidden_states(family: str) -> None:
    """Tapped hidden states, counted by decoder layer, equal transformers' own, also after the final norm."""
    model = tiny_model(family)
    tokens, rows = torch.arange(6) * 31 + 5, torch.arange(6)
    with torch.no_grad():
        own = model.hf(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    step = PlainStep(PlainRun(model.states), model.layers)
    logits, features = model.forward_features(tokens, rows, step, model.tap(range(len(own))), torch.tensor([5, 2]))
    torch.testing.assert_close(features, torch.cat([one[0] for one in own], -1), rtol=1e-3, atol=1e-3)
    whole = model.forward(tokens, rows, PlainStep(PlainRun(model.states), model.layers))
    torch.testing.assert_close(logits, whole[[5, 2]], rtol=1e-4, atol=1e-4)
