"""Test that SGLang's FA3 calls explain its wrong output on an H200 for draft steps with a sliding window.

SGLang 0.5.17 calls FA3 twice in a draft step. The first call attends to the committed tokens: the k branches are the
rows of one query, not causal, with the window (w, 0). The second call attends to each branch's own draft tokens.
FlashAttention aligns a right window end of 0 to the last row. So row t misses the newest k - 1 - t committed tokens,
although every branch should see them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftmark_sglang_judge.setups import ON_A_GPU, SETUPS, WINDOW

SETUP, PREFIXES = SETUPS["page1-tree"], (5, 33)
RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "judge-sglang-h200.json"
ITEM = "numerics.match_float64[page1-tree-draft-window]"


def _as_documented(length: int, branch: int) -> list[int]:
    """Return the committed tokens that a draft step's row should see with a window of `WINDOW`."""
    return list(range(max(0, length - WINDOW), length))


def _as_called(length: int, branch: int) -> list[int]:
    """Return the committed tokens that a branch's row does see in SGLang's first FA3 call."""
    end = length - SETUP.topk + branch
    return list(range(max(0, end - WINDOW), end + 1))


def _rows(seen: object) -> torch.Tensor:
    """Return the first draft step's attention in float64.

    A row sees the committed tokens that `seen` returns, and its branch's own draft token.
    """
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
    """Attention over the keys of SGLang's calls reproduces the recorded wrong value and the number of wrong rows."""
    targets = {one["target"]: one for one in json.loads(RECORD.read_text())["targets"]}
    [said] = [one for one in targets["sglang:fa3"]["wrong"] if one["item"] == ITEM]
    right, called = _rows(_as_documented), _rows(_as_called)
    assert float(said["expected"]) == pytest.approx(float(right[0, 0, 0]), abs=1e-6)
    assert float(said["got"].rpartition(" ")[2]) == pytest.approx(float(called[0, 0, 0]), abs=2**-8)
    wrong = (right - called).abs().flatten(1).amax(1) > 0.02
    assert wrong.tolist() == [True, True, False, True, True, True]
    assert "5 of 6 rows are wrong: r0 row 0, r0 row 1, r1 row 0, r1 row 1, r1 row 2" in said["said"]
