"""Tests of the kernel that computes the inputs of Gated DeltaNet layers, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmark_sglang.state_inputs import delta_inputs
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


def test_rows_without_length_stay_finite() -> None:
    """A query or key of zeros, as in padding rows, gives zeros."""
    layer = _layer(4, 2, 16, 16, torch.Generator().manual_seed(0))
    found = fused_inputs(layer, torch.zeros(2, 128), torch.zeros(2, 4), torch.zeros(2, 4))
    assert not found.q.any() and not found.k.any() and found.log_decay.isfinite().all()
