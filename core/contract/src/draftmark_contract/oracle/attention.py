"""Computes attention in float64 over sets of KV slots, one request at a time, and the tolerance of an output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import torch

from draftmark.geometry import AttentionShape

from .roundoffs import ROUNDOFFS
from .truth import Row

MOST_LOGITS = 2**24
"""Logits that are computed at once, 128 MiB in float64. A long prefill of many heads has 400 million."""
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of a dtype: half the spacing of its numbers at 1."""
Scales = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Answer:
    """Holds the oracle's output and two magnitudes that bound the rounding errors of a kernel.

    Attributes:
        out: float64 ``[rows, num_qo_heads, value_width]``; zero where a row sees nothing.
        reach: float64, like out: the weighted mean of |v|. It scales every rounding error in `out`.
        strain: float64 ``[rows, num_qo_heads, 1]``: an upper bound of scale · Σ|q·k| over the row's keys. It scales
            every rounding error in a logit. A sink adds |sink| times its weight.
        lse: float64 ``[rows, num_qo_heads, 1]``: natural log-sum-exp of a row's logits, without its sink. It is -inf
            where a row sees nothing.
        total: float64, like out: Σ|v| over the row's keys.
        rounded: the answer for rows of q rounded to e4m3, if the layer allows it (`AttentionShape.round_to_e4m3`).
    """

    out: torch.Tensor
    reach: torch.Tensor
    strain: torch.Tensor
    lse: torch.Tensor
    total: torch.Tensor
    rounded: Answer | None = None

    def at(self, rows: slice) -> Answer:
        """Return views of some rows."""
        other = None if self.rounded is None else self.rounded.at(rows)
        return Answer(self.out[rows], self.reach[rows], self.strain[rows], self.lse[rows], self.total[rows], other)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Mapping[Row, tuple[int, ...]],
    order: list[Row],
    shape: AttentionShape,
    scales: Scales = (None, None),
    sinks: torch.Tensor | None = None,
) -> Answer:
    """Compute softmax(cap · tanh(scale · q·k / cap)) · v over each row's slots.

    Query head h reads KV head h // (num_qo_heads / num_kv_heads).

    A sink is an extra, unscaled logit of a head. It has no value vector.

    Args:
        q: ``[rows, num_qo_heads, head_dim]``.
        k: ``[num_slots, num_kv_heads, head_dim]``.
        v: ``[num_slots, num_kv_heads, value_width]``.
        visible: KV slots of each row.
        order: (request, row) of each row of q, request by request. A row that is not in `visible` stays zero.
        scales: scales of k and v. The real value is the stored value times its scale.
        sinks: ``[num_qo_heads]``; None for a layer without sinks.
    """
    home = exact_device(q.device)
    sinks = None if sinks is None else sinks.to(home).double()
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=torch.float64, device=home)
    nothing = torch.full_like(out[..., :1], float("-inf"))
    answer = Answer(out, torch.zeros_like(out), torch.zeros_like(out[..., :1]), nothing, torch.zeros_like(out))
    first = 0
    for _, rows in groupby(order, key=lambda row: row[0]):
        lines = [visible.get(row, ()) for row in rows]
        here = slice(first, first + len(lines))
        first += len(lines)
        if any(lines):
            block = _Block(*_keys_of(lines, k, v, scales), shape, sinks)
            block.attend(q[here].to(home).double(), answer.at(here))
    if shape.round_to_e4m3:
        other = attend(rounded_rows(q), k, v, visible, order, replace(shape, round_to_e4m3=False), scales, sinks)
        answer = replace(answer, rounded=other)
    return answer


def rounded_rows(q: torch.Tensor) -> torch.Tensor:
    """Return q ``[rows, heads, dim]`` in float64, each row rounded to e4m3 as `AttentionShape.round_to_e4m3` says."""
    exact = q.to(exact_device(q.device)).double()
    exponent = torch.frexp(exact.abs().amax(-1, keepdim=True)).exponent  # largest element in [2**(e - 1), 2**e)
    scaled = torch.ldexp(exact, 8 - exponent)
    return torch.ldexp(scaled.to(torch.float8_e4m3fn).double(), exponent - 8)


class _Block:
    """Attends over the keys that any row of one request sees, with the number of times that each row sees each key."""

    def __init__(
        self,
        counts: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: AttentionShape,
        sinks: torch.Tensor | None,
    ) -> None:
        self.shape, self.sinks = shape, sinks
        self.counts = counts.to(keys.device)
        # KV that was never written is NaN. It must reach only rows that see it, also if other rows give it weight zero.
        broken = ~(values.isfinite().flatten(1).all(1) & keys.isfinite().flatten(1).all(1))
        self.poisoned = (self.counts[:, broken] > 0).any(1)
        self.keys, values = (one.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1) for one in (keys, values))
        self.both_values = torch.cat((values, values.abs()), -1)

    def attend(self, q: torch.Tensor, answer: Answer) -> None:
        """Write the output of rows q ``[n, heads, dim]`` into `answer`, with at most `MOST_LOGITS` logits at once."""
        size = max(1, MOST_LOGITS // (q.shape[1] * self.counts.shape[1]))
        for first in range(0, len(q), size):
            here = slice(first, first + size)
            self._attend(q[here], here, answer.at(here))

    def _attend(self, q: torch.Tensor, here: slice, answer: Answer) -> None:
        """Write the output of rows q, which are the rows `here` of the request."""
        shape, (n, heads, dim), width = self.shape, q.shape, self.both_values.shape[-1] // 2
        scale = dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale
        group = heads // shape.num_kv_heads
        grouped = q.view(n, shape.num_kv_heads, group, dim).permute(1, 0, 2, 3).reshape(-1, n * group, dim) * scale
        logits = grouped @ self.keys.transpose(1, 2)
        if shape.logits_soft_cap > 0:
            logits = shape.logits_soft_cap * torch.tanh(logits / shape.logits_soft_cap)
        times = self.counts[here].repeat_interleave(group, 0)
        # If the metadata names a key twice, its weight counts twice. A key that a row does not see has weight zero.
        logits = logits + times.log()
        weights, strain_of_sinks = self._weights(logits, n, group)
        both = weights @ self.both_values
        longest = (self.keys.norm(dim=-1)[:, None] * (times > 0)).amax(-1, keepdim=True)
        strain = grouped.norm(dim=-1, keepdim=True) * longest + strain_of_sinks
        total = times @ self.both_values[..., width:]
        both = torch.cat((both, strain, logits.logsumexp(-1, keepdim=True), total), -1)
        found = both.view(-1, n, group, 3 * width + 2).permute(1, 0, 2, 3).reshape(n, heads, -1)
        found[self.poisoned[here]] = float("nan")
        parts = torch.split(found, [width, width, 1, 1, width], -1)
        targets = answer.out, answer.reach, answer.strain, answer.lse, answer.total
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def _weights(self, logits: torch.Tensor, n: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the softmax weights of the keys, and the strain that the sink adds: |sink| times its weight.

        logits: ``[kv_heads, n · group, slots]``. strain: ``[kv_heads, n · group, 1]``.
        """
        if self.sinks is None:
            return logits.softmax(-1).nan_to_num(0.0), torch.zeros_like(logits[..., :1])
        column = self.sinks.view(-1, 1, group).expand(-1, n, -1).reshape(-1, n * group, 1)
        weights = torch.cat((logits, column), -1).softmax(-1).nan_to_num(0.0)
        felt = torch.where(weights[..., -1:] > 0, column.abs() * weights[..., -1:], 0.0)
        return weights[..., :-1], felt


def _keys_of(
    lines: list[tuple[int, ...]], k: torch.Tensor, v: torch.Tensor, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float64 counts ``[rows, slots]`` (times that each row sees each slot), and the slots' keys and values."""
    seen = torch.cat([torch.tensor(line, dtype=torch.int64) for line in lines])
    union, where = torch.unique(seen, return_inverse=True)
    row = torch.arange(len(lines)).repeat_interleave(torch.tensor([len(line) for line in lines]))
    counts = torch.bincount(row * len(union) + where, minlength=len(lines) * len(union)).double()
    counts = counts.view(len(lines), len(union))
    keys, values = (real_values(pool, union.to(pool.device), scale) for pool, scale in zip((k, v), scales, strict=True))
    return counts, keys, values


def real_values(pool: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the real values (stored value times scale) of some slots ``[slots, kv_heads, dim]`` in float64."""
    whole = pool.element_size() > 1
    # torch cannot index fp8 tensors, so their bytes are indexed.
    found = pool[slots] if whole else pool.view(torch.int8)[slots].view(pool.dtype)
    found = found.to(exact_device(found.device)).double()
    return found if scale is None else found * scale.to(found.device).double()


@cache
def exact_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU if the device has no float64. On Ascend A2, torch would use float32 instead."""
    return device if torch.ones(1, device=device).double().dtype is torch.float64 else torch.device("cpu")


def tolerance(answer: Answer, dtype: str, shape: AttentionShape, roundoffs: int = ROUNDOFFS) -> torch.Tensor:
    """Return the largest error of a correct kernel, for each element of `answer`.

    * bfloat16, float16: 3 unit roundoffs of Σ p|v|. One is for rounding the weights before p·v, one for rounding a
      partial result before parts are merged, and one for rounding the result. Errors of several parts do not add up,
      because a merge is a convex combination. Products of two such numbers are exact in float32. A plugin may declare
      a larger number (`notes`), e.g. 4 if partial results of two passes are merged once more.
    * float32: 2**-15 of Σ p|v| (512 roundoffs), for sums over a context and for the hardware's approximation of exp.
    * All dtypes: exp turns the absolute error of a logit into a relative error of its weight. A float32 sum of terms of
      size scale · Σ|q·k| has an error of up to 8 roundoffs of that size. For logits below 60 this is less than the
      errors above.
    * A soft cap adds 2 · cap · 2**-11 for low-precision inputs: tanh.approx.f32 has an error of 2**-11 (PTX ISA, tanh).
    * A layer with `round_to_e4m3` adds 2**-4 of Σ p|v| and 2**-17 of Σ|v|, for weights in e4m3. It adds 2**-11 of a
      logit's size, because tensor cores sum products of e4m3 with 13 bits.

    One extra or missing key among n moves an output by about |v| / n. The cases keep n small enough to show this error,
    or give nearly all weight to one key.
    """
    relative = 2.0**-15 if dtype == "float32" else roundoffs * UNIT[dtype]
    of_logits = 8 * UNIT["float32"] * answer.strain
    capped = 2 * shape.logits_soft_cap * 2.0**-11 if dtype != "float32" else 0.0
    bound = answer.reach * (of_logits.clamp(min=relative) + capped) + 1e-6
    if shape.round_to_e4m3:
        bound = bound + answer.reach * (2.0**-4 + 2 * 2.0**-11 * answer.strain) + 2.0**-17 * answer.total
    return bound
