"""Attention in float64 from sets of KV slots, one row at a time, and how far from it an output may lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from draftmark.geometry import AttentionShape

from .truth import Row

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9}
"""Unit roundoff: half the spacing of a dtype's numbers at 1."""


@dataclass(frozen=True)
class Answer:
    """Attributes:
    out: float64 ``[rows, num_qo_heads, head_dim]``; zero where a row sees nothing.
    reach: float64, like out: the weighted mean of |v|, the scale of every rounding error in `out`.
    """

    out: torch.Tensor
    reach: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Mapping[Row, tuple[int, ...]],
    order: list[Row],
    shape: AttentionShape,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Answer:
    """softmax(cap · tanh(scale · q·k / cap)) · v over each row's slots; head h reads KV head h // (heads / kv_heads).

    Args:
        q: ``[rows, num_qo_heads, head_dim]``.
        k, v: ``[num_slots, num_kv_heads, head_dim]``.
        order: the (request, row) of each row of q; one that is not in `visible` is left zero.
        scales: of k and v; a stored value times its scale is the real one.
    """
    home = exact_device(q.device)
    out = torch.zeros(q.shape, dtype=torch.float64, device=home)
    reach = torch.zeros_like(out)
    scale = shape.head_dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale
    per_kv_head = shape.num_qo_heads // shape.num_kv_heads
    for number, row in enumerate(order):
        slots = torch.tensor(visible.get(row, ()), dtype=torch.int64, device=q.device)
        if not slots.numel():
            continue
        keys, values = (_real(pool, slots, one, per_kv_head) for pool, one in zip((k, v), scales, strict=True))
        logits = torch.einsum("hd,shd->hs", q[number].to(home).double(), keys) * scale
        if shape.logits_soft_cap > 0:
            logits = shape.logits_soft_cap * torch.tanh(logits / shape.logits_soft_cap)
        weights = logits.softmax(-1)
        out[number] = torch.einsum("hs,shd->hd", weights, values)
        reach[number] = torch.einsum("hs,shd->hd", weights, values.abs())
    return Answer(out, reach)


@cache
def exact_device(device: torch.device) -> torch.device:
    """The device, or the CPU where the device has no float64: Ascend A2 takes float32 instead, with a warning."""
    return device if torch.ones(1, device=device).double().dtype is torch.float64 else torch.device("cpu")


def _real(pool: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None, per_kv_head: int) -> torch.Tensor:
    found = torch.stack([pool[slot] for slot in slots.tolist()]) if pool.element_size() == 1 else pool[slots]
    found = found.to(exact_device(found.device)).double()
    values = found if scale is None else found * scale.to(found.device).double()
    return values.repeat_interleave(per_kv_head, dim=1)


def tolerance(answer: Answer, dtype: str, shape: AttentionShape) -> torch.Tensor:
    """How far a correct kernel may be from `answer`, element by element.

    * bfloat16, float16: 4 unit roundoffs of Σ p|v|. One for rounding the weights before p·v, one for rounding the
      result, doubled because errors of several parts meet in a merge. Products of two such numbers are exact in
      float32.
    * float32: 2**-15 of Σ p|v| (512 roundoffs): sums over a context, and exp in the hardware's own approximation.
    * A soft cap adds 2 · cap · 2**-11 for low-precision inputs: tanh.approx.f32 errs by 2**-11 (PTX ISA, tanh).

    A key too many or too few among n moves an output by about |v| / n; the scenarios keep n small enough to show it.
    """
    relative = 2.0**-15 if dtype == "float32" else 4 * UNIT[dtype]
    if dtype != "float32":
        relative += 2 * shape.logits_soft_cap * 2.0**-11
    return answer.reach * relative + 1e-6
