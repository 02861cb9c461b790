"""Error bounds for attention with fp8 KV in engines that multiply fp8 by fp8 on tensor cores.

vLLM's layer rounds queries to e4m3 before its backend runs, and the kernel also rounds the softmax weights. Neither
rounding is an error of the backend. Its output is compared with float64 attention over the rounded queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch

from draftmark.geometry import AttentionShape

from ..oracle.attention import UNIT, Answer, Scales, exact_device, real_values
from ..oracle.truth import Row
from .step import Step

LARGEST = 448.0
"""Largest number of e4m3; larger values are clamped to it."""
WEIGHT = 2.0**-4
"""Relative rounding error of a softmax weight: half the spacing of e4m3 at 1."""
LEAST = 2.0**-10
"""Absolute rounding error, as a share of the row's largest weight: half of e4m3's smallest number. Smaller weights
become zero."""
SUM = 2.0**-12
"""Rounding error of a logit, as a share of its strain. Hopper's tensor cores keep 13 bits of a sum below its largest
term (DeepSeek-V3, 3.3.2). That term is at most an eighth of the strain for a head of 64 numbers."""
PARTS = 2.0**-8
"""Rounding error of a sum of 32 products, as a share of Σ p|v|; from the same 13 bits."""


def rounded(q: torch.Tensor) -> torch.Tensor:
    """Return queries rounded to e4m3 with scale 1, in their own dtype."""
    return q.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(q.dtype)


def loosened(
    answer: Answer,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    scales: Scales,
    step: Step,
) -> Answer:
    """Return the expected output with wider error bounds, which allow for softmax weights and sums rounded to e4m3.

    Args:
        answer: float64 attention over the rounded queries.
        q: live rows, rounded by `rounded`.
        pools, scales: arguments of `oracle.attention.attend`.
        step: step that produced the rows.
    """
    a = step.geometry.attention
    share = 3 * UNIT[a.q_dtype] + WEIGHT + PARTS + SUM * answer.strain
    lost = LEAST * _largest_share(q, pools, scales, step).to(answer.reach.device)
    return replace(answer, reach=answer.reach + lost / share, strain=share / (8 * UNIT["float32"]))


def _largest_share(
    q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], scales: Scales, step: Step
) -> torch.Tensor:
    """Return each row's and head's largest softmax weight times Σ|v| of its keys: float64 ``[rows, heads, dim]``."""
    a, visible, home = step.geometry.attention, step.truth.visible, exact_device(q.device)
    found: list[torch.Tensor] = []
    for rows in _of_each_request(step.forward.rows[: step.forward.live_rows]):
        here = slice(len(found), len(found) + len(rows))
        union = torch.tensor(sorted({slot for row in rows for slot in visible[row]}), dtype=torch.int64)
        seen = torch.stack([torch.isin(union, torch.tensor(visible[row])) for row in rows]).to(home)
        k, v = (
            real_values(pool, union.to(pool.device), scale).nan_to_num(0.0).repeat_interleave(a.group_size, 1)
            for pool, scale in zip(pools, scales, strict=True)
        )
        logits = _logits(q[here].to(home).double(), k, a).masked_fill(~seen[:, None], float("-inf"))
        best = logits.softmax(-1).nan_to_num(0.0).amax(-1, keepdim=True)
        found += list(best * torch.einsum("rn,nhd->rhd", seen.double(), v.abs()))
    return torch.stack(found)


def _logits(q: torch.Tensor, k: torch.Tensor, a: AttentionShape) -> torch.Tensor:
    assert a.softmax_scale is not None, "Geometry.create resolves the default"
    logits = torch.einsum("rhd,nhd->rhn", q, k) * a.softmax_scale
    return a.logits_soft_cap * torch.tanh(logits / a.logits_soft_cap) if a.logits_soft_cap > 0 else logits


def _of_each_request(rows: list[Row]) -> Iterator[list[Row]]:
    for _, mine in groupby(rows, key=lambda row: row[0]):
        yield list(mine)
