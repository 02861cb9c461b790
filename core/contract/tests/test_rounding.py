"""Tests of the bound for layers that let attend round its operands to e4m3, against a kernel in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import AttentionShape
from draftmark_contract.harness.assertions import wrong_elements
from draftmark_contract.oracle.attention import Answer, attend, rounded_rows

EXACT = AttentionShape(8, 2, 64, 16, kv_dtype="float8_e4m3fn", softmax_scale=0.125)
ROUNDS = replace(EXACT, round_to_e4m3=True)
ROWS, KEYS = 6, 160
SEEN = (160, 159, 158, 157, 3, 2)
"""Keys that each row sees."""


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round float64 numbers to e4m3."""
    return x.to(torch.float8_e4m3fn).double()


def layer(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random q in bfloat16, and K and V in e4m3; some keys have most of a row's weight."""
    torch.manual_seed(seed)
    q = (torch.randn(ROWS, 8, 64) * torch.tensor([0.01, 1.0, 3.0, 20.0, 1.0, 0.3])[:, None, None]).bfloat16()
    k, v = (torch.randn(KEYS, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
    return q, k, v


def oracle(seed: int, shape: AttentionShape) -> Answer:
    """Return the oracle's answer."""
    order = [(0, row) for row in range(ROWS)]
    return attend(*layer(seed), {(0, row): tuple(range(count)) for row, count in enumerate(SEEN)}, order, shape)


def kernel(seed: int, round_weights=to_e4m3, round_q=rounded_rows, missing: int = -1) -> torch.Tensor:
    """Return the output of a kernel that rounds q and the weights. The largest weight becomes 2**7 to 2**8.75."""
    q, k, v = layer(seed)
    keys, values = (one.double().repeat_interleave(4, 1) for one in (k, v))
    scores = torch.einsum("rhd,nhd->rhn", round_q(q), keys) * EXACT.softmax_scale
    seen = torch.arange(KEYS) < torch.tensor(SEEN)[:, None]
    seen &= torch.arange(KEYS) != missing
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    top = scores.amax(-1, keepdim=True) / torch.log(torch.tensor(2.0))
    p = torch.exp2(scores / torch.log(torch.tensor(2.0)) - top + 7 + 1.75 * torch.rand(ROWS, 8, 1))
    return (torch.einsum("rhn,nhd->rhd", round_weights(p), values) / p.sum(-1, keepdim=True)).bfloat16()


@pytest.mark.parametrize("seed", range(2))
def test_rounded_operands_are_right_where_they_are_allowed(seed: int) -> None:
    """A kernel that rounds q and the weights to e4m3 is within the bound, and so is one that rounds nothing."""
    answer = oracle(seed, ROUNDS)
    assert not wrong_elements(kernel(seed), answer, ROUNDS)[0].any()
    assert not wrong_elements(kernel(seed, lambda p: p, lambda q: q.double()), answer, ROUNDS)[0].any()


@pytest.mark.parametrize("seed", range(2))
def test_rounded_operands_are_wrong_where_they_are_not_allowed(seed: int) -> None:
    """The same kernel fails for a layer without the permission, also if it rounds only q or only the weights."""
    answer = oracle(seed, EXACT)
    for out in (kernel(seed), kernel(seed, lambda p: p), kernel(seed, round_q=lambda q: q.double())):
        assert wrong_elements(out, answer, EXACT)[0].any()


@pytest.mark.parametrize(
    "fault",
    [
        {"round_weights": lambda p: p.to(torch.float8_e5m2).double()},
        {"round_weights": lambda p: to_e4m3(p / 256)},
        {"round_weights": lambda p: torch.floor(p / 16) * 16},
        {"round_q": lambda q: q.double().to(torch.float8_e5m2).double()},
        {"round_q": lambda q: to_e4m3(q.double() / 1024) * 1024},
        {"missing": 1},
    ],
    ids=["weights-e5m2", "weights-below-one", "weights-cut", "q-e5m2", "q-subnormal", "a-key-missing"],
)
def test_coarser_rounding_is_wrong(fault: dict) -> None:
    """A kernel that rounds to fewer bits or to a smaller range than e4m3, or skips a key, exceeds the bound.

    A fault may stay within the bound on one random layer, so the kernel runs on two.
    """
    found = [wrong_elements(kernel(seed, **fault), oracle(seed, ROUNDS), ROUNDS)[0].any() for seed in range(2)]
    assert any(found)
