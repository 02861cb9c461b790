"""Correct backend in plain torch for the tests of `draftmark judge`: metadata buffers, graphs and a paged cache.

Each class in `defects.py` changes one method of this backend to make one mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftmark.geometry import Geometry
from draftmark_contract.check import Refused
from draftmark_contract.judge.driver import SCALES, Capturable, EngineCapabilities
from draftmark_contract.judge.step import Step


@dataclass
class Metadata:
    """Batch metadata of one step, for correct and defective backends; tensors are views of the builder's buffers.

    Attributes:
        starts: first row of each request, int64 ``[requests + 1]``.
        lens: KV lengths in tokens, int64 ``[requests]``.
        table: page table, int64 ``[requests, columns]``.
        slots: slot mapping, int64 ``[rows]``; rows with -1 are not stored.
        longest: host's upper bound of the lengths, in tokens.
    """

    starts: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    longest: int


class PagedDriver:
    """Correct paged backend; it implements the protocol `draftmark_contract.judge.driver.Driver`."""

    capturable = Capturable.ANY
    rounds_queries = False

    def __init__(self, geometry: Geometry, num_pages: int) -> None:
        a = self.a = geometry.attention
        if a.head_dim == 80:
            raise Refused("head_size not supported")
        self.geometry = geometry
        dtype = getattr(torch, a.kv_dtype)
        self.k, self.v = (torch.zeros(num_pages * a.page_size, a.num_kv_heads, a.head_dim, dtype=dtype) for _ in "kv")
        self.scales = SCALES if a.kv_dtype == "float8_e4m3fn" else (1.0, 1.0)
        limits = geometry.limits
        self.reqs = max(*limits.capture_batch_sizes, limits.max_num_reqs)
        rows = self.reqs * geometry.draft.num_draft_tokens + limits.max_extend_tokens + 64
        self.wall = limits.max_context_len + geometry.draft.num_draft_tokens
        self.starts = torch.zeros(self.reqs + 1, dtype=torch.int64)
        self.lens = torch.zeros(self.reqs, dtype=torch.int64)
        self.table = torch.full((self.reqs, -(-self.wall // a.page_size) + 1), num_pages - 1)
        self.slots = torch.full((rows,), -1)

    # -- memory -------------------------------------------------------------------------------------------

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V straight into the pools, without a step."""
        for pool, values in ((self.k, k), (self.v, v)):
            _bits(pool)[slots] = _bits(values)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V at these slots."""
        k, v = (_bits(pool)[slots].clone().view(pool.dtype) for pool in (self.k, self.v))
        return k, v

    # -- steps --------------------------------------------------------------------------------------------

    def forward(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Run a step eagerly."""
        count = len(step.forward.requests)
        return self.layer(self.build(step, count, len(q)), q, k, v)

    def capture(self, rows_each: int, requests: int) -> Metadata:
        """Fill the buffers with dummy values and return views of them; every replay reads these views."""
        self.starts[: requests + 1] = torch.arange(requests + 1) * rows_each
        self.lens[:requests] = rows_each
        self.table[:requests] = 0
        self.slots.fill_(-1)
        return self.views(requests, rows_each * requests, self.wall)

    def replay(self, graph: Metadata, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Fill the captured buffers, then run the layer on them."""
        self.build(step, len(graph.lens), len(q))
        return self.layer(graph, q, k, v)

    def build(self, step: Step, padded: int, rows: int) -> Metadata:
        """Fill the buffers for a step padded to `padded` requests and `rows` rows."""
        requests = step.forward.requests
        counts = torch.tensor([one.rows for one in requests], dtype=torch.int64)
        self.starts[: len(requests) + 1] = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.starts[len(requests) :] = self.starts[len(requests)].clone()
        self.lens.zero_()
        self.lens[: len(requests)] = torch.tensor([one.prefix + one.rows for one in requests], dtype=torch.int64)
        for number, one in enumerate(requests):
            self.table[number, : len(one.pages)] = torch.tensor(one.pages, dtype=torch.int64)
        self.table[len(requests) : padded] = 0
        self.slots.fill_(-1)
        self.slots[: step.forward.live_rows] = torch.tensor([step.writes.get(row, -1) for row in step.forward.rows])
        longest = max((min(one.prefix + one.rows + step.loose, self.wall) for one in requests), default=0)
        return self.views(padded, rows, longest)

    def views(self, requests: int, rows: int, longest: int) -> Metadata:
        """Return views of the buffers for the first `requests` requests and `rows` rows."""
        return Metadata(
            self.starts[: requests + 1], self.lens[:requests], self.table[:requests], self.slots[:rows], longest
        )

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store the step's K and V, then compute attention."""
        self.store(meta, k, v)
        out = torch.full_like(q, float("nan"))
        for number in range(len(meta.lens)):
            first, last = int(meta.starts[number]), int(meta.starts[number + 1])
            if last > first:
                out[first:last] = self.attend(q[first:last], number, meta)
        return out

    def store(self, meta: Metadata, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v in the pools; rows with slot -1 are skipped."""
        stored = meta.slots >= 0
        for pool, rows, scale in zip((self.k, self.v), (k, v), self.scales, strict=True):
            _bits(pool)[meta.slots[stored]] = _bits((rows[stored].float() / scale).to(pool.dtype))

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        """Return the output of one request's rows, ``[rows, heads, dim]``."""
        length, rows = int(meta.lens[number]), len(q)
        slots = self.slots_of(number, length, meta)
        k, v = (pool[slots].double() * s for pool, s in zip(self._floats(), self.scales, strict=True))
        k, v = (one.repeat_interleave(self.a.group_size, 1) for one in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q.double(), k) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        at = torch.arange(length - rows, length)[:, None]
        scores = scores.masked_fill(~self.visible(at, torch.arange(length)), float("-inf"))
        return torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v).to(q.dtype)

    def slots_of(self, number: int, length: int, meta: Metadata) -> torch.Tensor:
        """Return the KV slots of a request's tokens, int64 ``[length]``."""
        size = self.a.page_size
        pages = meta.table[number, : -(-length // size)]
        return (pages[:, None] * size + torch.arange(size)).flatten()[:length]

    def visible(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the causal mask, limited to the sliding window."""
        seen = key <= at
        return seen & (key >= at - self.a.window_left) if self.a.window_left >= 0 else seen

    @property
    def scale(self) -> float:
        """Factor of the product q·k (the softmax scale)."""
        assert self.a.softmax_scale is not None
        return self.a.softmax_scale

    @property
    def cap(self) -> float:
        """Soft cap of the logits."""
        return self.a.logits_soft_cap

    def _floats(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.k.element_size() > 1:
            return self.k, self.v
        return self.k.float(), self.v.float()


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def caps(make: Callable[[Geometry, int], PagedDriver] = PagedDriver, slow: bool = True) -> EngineCapabilities:
    """Return capabilities of a CPU engine that opens backends of this driver class."""
    return EngineCapabilities(open=make, device="cpu", slow=slow)
