"""Tests of the inputs of the recurrence, also of their kernel in Triton's interpreter, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmark_sglang.state_inputs import delta_inputs, mamba2_inputs
from draftmark_sglang.state_kernels import fused_inputs


def _layer(heads: int, key_heads: int, keys: int, values: int, make: torch.Generator) -> Any:
    return SimpleNamespace(
        num_v_heads=heads,
        num_k_heads=key_heads,
        head_k_dim=keys,
        q_dim=key_heads * keys,
        k_dim=key_heads * keys,
        v_dim=heads * values,
        A_log=torch.randn(heads, generator=make),
        dt_bias=torch.randn(heads, generator=make),
    )


def _expected(layer: Any, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the formulas' values in float64."""
    rows, wide = len(mixed), mixed.double()
    q = wide[:, : layer.q_dim].view(rows, layer.num_k_heads, layer.head_k_dim)
    k = wide[:, layer.q_dim : layer.q_dim + layer.k_dim].view(q.shape)
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    steps = torch.log1p(torch.exp(a.double() + layer.dt_bias.double()))
    return {
        "q": q / layer.head_k_dim**0.5,
        "k": k,
        "v": wide[:, layer.q_dim + layer.k_dim :].view(rows, layer.num_v_heads, -1),
        "log_decay": -layer.A_log.double().exp() * steps,
        "beta": 1 / (1 + torch.exp(-b.double())),
    }


@pytest.mark.parametrize("compute", [fused_inputs, delta_inputs], ids=["kernel", "torch"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [(32, 16, 128, 128), (4, 2, 16, 24), (6, 3, 40, 8), (1, 1, 8, 8)])
def test_inputs_are_the_formulas_values(shape: tuple[int, int, int, int], rows: int, compute: Any) -> None:
    """Queries, keys, values and gates equal float64, for rows with any pitch and gates of any size."""
    make = torch.Generator().manual_seed(rows)
    layer = _layer(*shape, make)
    heads, wide = shape[0], layer.q_dim + layer.k_dim + layer.v_dim
    mixed = torch.randn(rows, wide + 3, generator=make)[:, :wide]
    gates = 30 * torch.randn(rows, 2 * heads + 1, generator=make)
    a, b = gates[:, :heads], gates[:, heads : 2 * heads]
    want = _expected(layer, mixed, a, b)
    found = compute(layer, mixed, a, b)
    for name, one in want.items():
        got = getattr(found, name)
        assert got.shape == one.shape, name
        torch.testing.assert_close(got.double(), one, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("raw_beta", [True, False])
def test_inputs_with_a_decay_for_each_key_element(raw_beta: bool) -> None:
    """KDA's decays have one number for each key element; for prompts SGLang gives β after its sigmoid."""
    make = torch.Generator().manual_seed(2)
    layer = _layer(3, 3, 8, 8, make)
    layer.dt_bias = torch.randn(3 * 8, generator=make)
    mixed, a = torch.randn(4, 72, generator=make), 5 * torch.randn(4, 3, 8, generator=make)
    b = torch.rand(4, 3, generator=make)
    found = delta_inputs(layer, mixed, a, b, raw_beta)
    steps = torch.log1p(torch.exp(a.double() + layer.dt_bias.view(3, 8).double()))
    want = -layer.A_log.double().exp()[:, None] * steps
    torch.testing.assert_close(found.log_decay.double(), want, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found.beta, b.sigmoid() if raw_beta else b)


def test_inputs_of_mamba2() -> None:
    """Mamba2's rows are B, C and dt · x with decay dt · A, and D · x is added to the output."""
    make = torch.Generator().manual_seed(3)
    mixer = SimpleNamespace(tp_size=1, num_heads=4, head_dim=6, groups_ssm_state_size=2 * 5, ssm_state_size=5)
    mixer.dt_bias, mixer.D = torch.randn(4, generator=make), torch.randn(4, generator=make)
    mixer.A = -torch.rand(4, generator=make)
    mixed, dt = torch.randn(3, 24 + 20, generator=make), 5 * torch.randn(3, 4, generator=make)
    found = mamba2_inputs(mixer, mixed, dt)
    steps = torch.log1p(torch.exp(dt.double() + mixer.dt_bias.double()))
    x = mixed[:, :24].double().view(3, 4, 6)
    want = dict(v=steps[..., None] * x, log_decay=steps * mixer.A.double(), skip=mixer.D.double()[:, None] * x)
    want |= dict(k=mixed[:, 24:34].double().view(3, 2, 5), q=mixed[:, 34:].double().view(3, 2, 5))
    for name, one in want.items():
        torch.testing.assert_close(getattr(found, name).double(), one, rtol=2e-5, atol=1e-6)
    assert found.beta is None


def test_rows_without_length_stay_finite() -> None:
    """A query or key of zeros, as in padding rows, gives zeros."""
    layer = _layer(4, 2, 16, 16, torch.Generator().manual_seed(0))
    found = fused_inputs(layer, torch.zeros(2, 128), torch.zeros(2, 4), torch.zeros(2, 4))
    assert not found.q.any() and not found.k.any() and found.log_decay.isfinite().all()
