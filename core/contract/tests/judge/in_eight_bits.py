"""Backend that models tensor cores: products in e4m3, tiles of 32 keys, and an online softmax."""

from __future__ import annotations

from typing import Any

import torch

from draftmark_contract.judge.eight_bits import rounded

from .paged import Metadata, PagedDriver

TILE = 32


class InEightBits(PagedDriver):
    """Models vLLM's Triton kernel with fp8 KV: queries and softmax weights are rounded to e4m3, sums are not."""

    @property
    def rounds_queries(self) -> bool:  # type: ignore[override]
        """True if KV is fp8, because queries are then rounded too."""
        return self.a.kv_dtype == "float8_e4m3fn"

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        """Return the output of one request's rows, ``[rows, heads, dim]``."""
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
    """Compute the output ``[heads, rows, dim]`` from scores ``[heads, rows, keys]`` and v ``[keys, heads, dim]``."""
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
    """Declares that the queries are not rounded, although they are."""

    rounds_queries = False  # type: ignore[assignment]


class NoValueScale(InEightBits):
    """Does not apply the scale of fp8 V when V is read."""

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        """Compute attention with a V scale of 1."""
        kept, self.scales = self.scales, (self.scales[0], 1.0)
        found = super().attend(q, number, meta)
        self.scales = kept
        return found


class ForgetsAKey(InEightBits):
    """Hides each row's own token from the row."""

    def visible(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Mask the row's own token, except at position 0."""
        return super().visible(at, key) & ((key < at) | (at == 0))


class QueriesInHalfThePrecision(InEightBits):
    """Rounds queries to e5m2, which has one mantissa bit less than e4m3."""

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Round the queries to e5m2 before the layer rounds them to e4m3."""
        return super().layer(meta, rounded(q).to(torch.float8_e5m2).to(q.dtype), k, v)
