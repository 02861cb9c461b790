"""Explanation of FA3's wrong output on an H200 for draft steps with a sliding window, computed from its calls.

SGLang 0.5.17 calls FA3 twice in a draft step. The first call has a step's branches as the rows of one query over the
committed tokens, not causal, with a window of (w, 0). The second has each branch's own drafts. A window's right end
of 0 is aligned to the last row, as in causal attention: of k rows, row t ends k - 1 - t tokens before the newest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftmark_sglang.judge.setups import ON_A_GPU, SETUPS, WINDOW

SETUP, PREFIXES = SETUPS["page1-tree"], (5, 33)
RECORD = Path(__file__).parents[4] / "benchmarks" / "results" / "judge-sglang-h200.json"
ITEM = "numerics.match_float64[page1-tree-draft-window]"


def _as_documented(length: int, branch: int) -> list[int]:
    """Return the committed tokens that a window of `WINDOW` leaves visible to a draft step's first token."""
    return list(range(max(0, length - WINDOW), length))


def _as_called(length: int, branch: int) -> list[int]:
    """Return the committed tokens that the first call leaves visible, by FlashAttention's rule for several rows."""
    end = length - SETUP.topk + branch
    return list(range(max(0, end - WINDOW), end + 1))


def _rows(seen: object) -> torch.Tensor:
    """Return the scene's first step in float64, over the committed tokens of `seen` and each branch's own token."""
    make = torch.Generator().manual_seed(0)
    shape = (ON_A_GPU.num_kv_heads, ON_A_GPU.head_dim)
    pools = [[torch.randn(length, *shape, generator=make).bfloat16().double() for length in PREFIXES] for _ in "kv"]
    make = torch.Generator().manual_seed(1000)
    heads = (ON_A_GPU.num_qo_heads, ON_A_GPU.num_kv_heads, ON_A_GPU.num_kv_heads)
    count = len(PREFIXES) * SETUP.topk
    q, k, v = (torch.randn(count, one, ON_A_GPU.head_dim, generator=make).bfloat16().double() for one in heads)
    out = []
    for at in range(count):
        request, branch = divmod(at, SETUP.topk)
        keys = seen(PREFIXES[request], branch)  # type: ignore[operator]
        both = [torch.cat([pool[request][keys], own[at : at + 1]]) for pool, own in zip(pools, (k, v), strict=True)]
        wide = [one.repeat_interleave(heads[0] // heads[1], 1) for one in both]
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[at], wide[0]) / ON_A_GPU.head_dim**0.5, -1)
        out.append(torch.einsum("hn,nhd->hd", weights, wide[1]))
    return torch.stack(out)


def test_calls_explain_the_recorded_output() -> None:
    """The computed rows equal the record: the same value, and the same five of six rows are wrong."""
    targets = {one["target"]: one for one in json.loads(RECORD.read_text())["targets"]}
    [said] = [one for one in targets["sglang:fa3"]["wrong"] if one["item"] == ITEM]
    right, called = _rows(_as_documented), _rows(_as_called)
    assert float(said["expected"]) == pytest.approx(float(right[0, 0, 0]), abs=1e-6)
    assert float(said["got"].rpartition(" ")[2]) == pytest.approx(float(called[0, 0, 0]), abs=2**-8)
    wrong = (right - called).abs().flatten(1).amax(1) > 0.02
    assert wrong.tolist() == [True, True, False, True, True, True]
    assert "5 of 6 rows are wrong: r0 row 0, r0 row 1, r1 row 0, r1 row 1, r1 row 2" in said["said"]
