"""A right backend whose products are of e4m3, as tensor cores make them: tiles of 32 keys, and a running maximum."""

from __future__ import annotations

from typing import Any

import torch

from draftmark_contract.judge.eight_bits import rounded

from .paged import Metadata, PagedDriver

TILE = 32


class InEightBits(PagedDriver):
    """What vLLM's Triton kernel computes on a GPU where KV is fp8: queries and weights are rounded, sums are not."""

    @property
    def rounds_queries(self) -> bool:  # type: ignore[override]
        """Where KV is fp8."""
        return self.a.kv_dtype == "float8_e4m3fn"

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        """Rows of one request."""
        if self.a.kv_dtype != "float8_e4m3fn":
            return super().attend(q, number, meta)
        length, rows = int(meta.lens[number]), len(q)
        slots = self.slots_of(number, length, meta)
        k, v = (pool[slots].double().repeat_interleave(self.a.group_size, 1) for pool in self._floats())
        scores = torch.einsum("qhd,nhd->hqn", _eight(q), k) * self.scale * self.scales[0]
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        at = torch.arange(length - rows, length)[:, None]
        scores = scores.masked_fill(~self.visible(at, torch.arange(length)), float("-inf"))
        return (_in_tiles(scores, v) * self.scales[1]).transpose(0, 1).to(q.dtype)


def _in_tiles(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores ``[heads, rows, keys]`` and v ``[keys, heads, dim]``, to ``[heads, rows, dim]``."""
    top = torch.full((*scores.shape[:2], 1), float("-inf"), dtype=torch.float64)
    total, sums = torch.zeros_like(top), torch.zeros(*scores.shape[:2], v.shape[-1], dtype=torch.float64)
    for first in range(0, len(v), TILE):
        tile = scores[..., first : first + TILE]
        highest = torch.maximum(top, tile.amax(-1, keepdim=True))
        base = highest.where(highest.isfinite(), torch.zeros(()).double())
        weights, shrink = (tile - base).exp(), (top - base).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        sums = sums * shrink + torch.einsum("hqn,nhd->hqd", _eight(weights), v[first : first + TILE])
        top = highest
    return sums / total


def _eight(values: torch.Tensor) -> Any:
    return rounded(values.float()).double()


class Undeclared(InEightBits):
    """Says that its queries are as they were given."""

    rounds_queries = False  # type: ignore[assignment]


class NoValueScale(InEightBits):
    """The scale of fp8 values is forgotten when they are read."""

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        """Rows of one request."""
        kept, self.scales = self.scales, (self.scales[0], 1.0)
        found = super().attend(q, number, meta)
        self.scales = kept
        return found


class ForgetsAKey(InEightBits):
    """A row does not see its own token."""

    def visible(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Every earlier one."""
        return super().visible(at, key) & ((key < at) | (at == 0))


class QueriesInHalfThePrecision(InEightBits):
    """Queries go through e5m2."""

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Rounded once more than vLLM does."""
        return super().layer(meta, rounded(q).to(torch.float8_e5m2).to(q.dtype), k, v)
