"""Products in e4m3: what an engine makes of its queries where KV is fp8, and how far from float64 its outputs may lie.

Tensor cores multiply fp8 by fp8. vLLM's layer therefore rounds the queries before its backend sees them, and the kernel
rounds its weights too; neither is an error of the backend, whose answer is judged for the queries that it was given.
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
"""Of e4m3; what lies above it becomes it."""
WEIGHT = 2.0**-4
"""Of a weight: half the spacing of e4m3's numbers at 1."""
LEAST = 2.0**-10
"""Of a row's largest weight: half of e4m3's smallest number, so that smaller weights are zero."""
SUM = 2.0**-12
"""Of a logit's strain: tensor cores of Hopper keep 13 bits of a sum behind its largest term (DeepSeek-V3, 3.3.2), which
is an eighth of the strain or less where a head has 64 numbers."""
PARTS = 2.0**-8
"""Of Σ p|v|: the same of a sum of 32 products."""


def rounded(q: torch.Tensor) -> torch.Tensor:
    """Queries as e4m3 with a scale of 1 holds them, in their own dtype."""
    return q.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(q.dtype)


def loosened(
    answer: Answer,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    scales: Scales,
    step: Step,
) -> Answer:
    """An answer that `oracle.attention.tolerance` gives room for weights and sums in e4m3.

    Args:
        q: live rows, as rounded. pools, scales: as `oracle.attention.attend` takes them.
    """
    a = step.geometry.attention
    share = 3 * UNIT[a.q_dtype] + WEIGHT + PARTS + SUM * answer.strain
    lost = LEAST * _largest_share(q, pools, scales, step).to(answer.reach.device)
    return replace(answer, reach=answer.reach + lost / share, strain=share / (8 * UNIT["float32"]))


def _largest_share(
    q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], scales: Scales, step: Step
) -> torch.Tensor:
    """Of each row and head, the largest weight times Σ|v| of the keys it sees: float64 ``[rows, heads, dim]``."""
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
