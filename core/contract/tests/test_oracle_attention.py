"""Tests of the oracle's float64 attention: how it divides a long request."""

from __future__ import annotations

import pytest
import torch

from draftmark import AttentionShape
from draftmark_contract.oracle import attention


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
    for name in ("out", "reach", "strain"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), equal_nan=True, rtol=1e-13, atol=1e-13)
