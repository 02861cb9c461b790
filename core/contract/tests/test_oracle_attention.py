"""Tests of the oracle's float64 attention: how it divides a long request, and how it reads latent rows."""

from __future__ import annotations

import math

import pytest
import torch

from draftmark import AttentionShape
from draftmark_contract.oracle import attention
from draftmark_contract.oracle.latent import keys_and_values


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, 8)])
def test_parts_of_a_request_give_the_whole_answer(monkeypatch: pytest.MonkeyPatch, sinks: torch.Tensor | None) -> None:
    """Logits that are computed a few rows at a time give the answer of one pass, NaN included."""
    dice = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 16, generator=dice) for n, heads in ((40, 8), (90, 2), (90, 2)))
    k[60] = float("nan")
    visible = {(n, row): tuple(range(row, 50 + row)) for n in range(2) for row in range(20)}
    shape = AttentionShape(8, 2, 16, 16)

    def answer() -> attention.Answer:
        return attention.attend(q, k, v, visible, list(visible), shape, sinks=sinks)

    whole = answer()
    monkeypatch.setattr(attention, "MOST_LOGITS", 3 * 8 * 69 + 1)
    parts = answer()
    assert whole.out.isnan().flatten(1).any(1).tolist() == [row > 10 for _, row in visible]
    for name in ("out", "reach", "strain", "lse"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), equal_nan=True, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("parts", [1, 2])
def test_latent_rows_equal_a_sum_over_their_keys(parts: int) -> None:
    """Weights come from whole rows, values are their first elements, and the log-sum-exp leaves the sink out."""
    dice = torch.Generator().manual_seed(0)
    q, rows = torch.randn(3, 5, 12, generator=dice), torch.randn(20, 1, 12, generator=dice)
    shape = AttentionShape(5, 1, 12, 16, softmax_scale=0.3, value_dim=8, latent=True)
    visible = {(0, 0): (4,), (0, 1): tuple(range(4, 9)), (1, 0): ()}
    pools = [rows] if parts == 1 else [rows[..., :8].contiguous(), rows[..., 8:].contiguous()]
    sinks = torch.linspace(-1, 1, 5)
    answer = attention.attend(q, *keys_and_values(pools, shape), visible, list(visible), shape, sinks=sinks)
    for number, slots in enumerate(visible.values()):
        for head in range(5):
            logits = [0.3 * float(q[number, head].double() @ rows[slot, 0].double()) for slot in slots]
            mass = [math.exp(one) for one in logits]
            total = sum(mass) + math.exp(float(sinks[head]))
            want = torch.zeros(8, dtype=torch.float64)
            for weight, slot in zip(mass, slots, strict=True):
                want += weight / total * rows[slot, 0, :8]
            torch.testing.assert_close(answer.out[number, head], want, rtol=1e-6, atol=1e-6)
            lse = math.log(sum(mass)) if mass else -math.inf
            assert float(answer.lse[number, head, 0]) == pytest.approx(lse)
