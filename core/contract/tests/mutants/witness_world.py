"""Forwards over a KV pool with known contents, and their float64 result, for the tests of the mutants `O…`.

Only the public API of `draftmark` is used. The attention here is written from docs/design.md, independently of the
suite's oracle and of the reference backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftmark import AttentionShape, DraftShape, Form, Geometry, Limits, Mode
from draftmark.loaded import LoadedBackend
from draftmark.runtime import (
    AttentionBackend,
    BatchBuffers,
    Exact,
    ForwardBatch,
    HostLengths,
    KVCache,
    Tree,
    Unknown,
    ragged,
)

from .mutant import Mutant

Tensor = torch.Tensor
CLOSE = 1e-3
"""Largest difference of a right float32 output from float64, for values of about 1."""
ALL = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.DRAFT_EXTEND)


def geometry(
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    page: int = 4,
    *,
    reqs: int = 4,
    context: int = 64,
    nodes: int = 4,
    block: int = 0,
    budgets: tuple[int, ...] = (),
    capture: tuple[int, ...] = (),
    modes: tuple[Mode, ...] = ALL,
    forms: tuple[Form, ...] = (),
    extend: int = 256,
    **attention: Any,
) -> Geometry:
    """Return a small float32 geometry; `attention` has further fields of `AttentionShape`."""
    fields = {"q_dtype": "float32", "kv_dtype": "float32", **attention}
    return Geometry.create(
        AttentionShape(*heads, dim, page, **fields),
        Limits(reqs, context, max_extend_tokens=extend, capture_batch_sizes=capture, row_budgets=budgets),
        DraftShape(num_draft_tokens=nodes, block_size=block),
        modes=modes,
        forms=forms,
    )


@dataclass(frozen=True)
class Request:
    """One live request: committed tokens, page ids, and new rows (all of them tail slots)."""

    prefix: int
    pages: tuple[int, ...]
    rows: int = 1


def requests(shape: Geometry, prefixes: Sequence[int], rows: Sequence[int] | int = 1, first: int = 1) -> list[Request]:
    """Return requests with pages of their own, in descending order of ids, from page `first` on."""
    counts = [rows] * len(prefixes) if isinstance(rows, int) else list(rows)
    found, taken = [], first
    for prefix, count in zip(prefixes, counts, strict=True):
        needed = shape.pages_for(prefix, max(1, count))
        found.append(Request(prefix, tuple(range(taken + needed - 1, taken - 1, -1)), count))
        taken += needed
    return found


def pools(shape: Geometry, pages: int, layers: int = 1, seed: int = 0) -> list[KVCache]:
    """Return caches in one tensor per side, every slot with a random value, except the null page."""
    a, dice = shape.attention, torch.Generator().manual_seed(seed)
    size = (layers, pages, a.page_size, a.num_kv_heads, a.head_dim)
    k, v = (torch.randn(size, generator=dice).to(getattr(torch, a.kv_dtype)) for _ in range(2))
    for one in (k, v):
        one.view(torch.uint8)[:, 0] = 0
    return [KVCache(k[i], v[i]) for i in range(layers)]


@dataclass
class Forward:
    """One forward of live requests: its batch, its rows, and what float64 attention makes of them.

    `parents` is the tree of every request; None means a causal tail, or a block in DRAFT_BLOCK.
    """

    shape: Geometry
    mode: Mode
    live: list[Request]
    caches: list[KVCache]
    parents: Sequence[int] | None = None
    padded: int = 0
    host: HostLengths | None = None
    seed: int = 1
    buffers: BatchBuffers | None = None
    budget: int = 0
    batch: ForwardBatch = field(init=False)
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(init=False)
    before: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        a, dice = self.shape.attention, torch.Generator().manual_seed(self.seed)
        self.buffers = self.buffers or BatchBuffers(self.shape, "cpu")
        self.padded = self.padded or len(self.live)
        self.host = self.host or Exact(tuple(one.prefix for one in self.live))
        self.batch = self._batch(self.buffers)
        dtype, n = getattr(torch, a.q_dtype), self.batch.num_rows
        heads = (a.num_qo_heads, a.num_kv_heads, a.num_kv_heads)
        self.rows = []
        for _ in self.caches:
            q, k, v = (torch.randn(n, count, a.head_dim, generator=dice).to(dtype) for count in heads)
            self.rows.append((q, k, v, torch.full_like(q, float("nan"))))
        self.before = []

    def refill(self, live: list[Request]) -> None:
        """Fill the same batch and rows for other requests, as an engine does before a replay."""
        self.live, n = live, len(live)
        self.batch = replace(self.batch, num_reqs=n, host=Exact(tuple(one.prefix for one in live)))
        self._fill(self.batch)

    def run(self, backend: AttentionBackend) -> float:
        """Run the four methods in order and return `error()`."""
        backend.plan(self.batch)
        backend.write_metadata(self.batch)
        self.attend(backend)
        return self.error()

    def attend(self, backend: AttentionBackend) -> None:
        """Run `write_kv` and `attend` of every layer."""
        self.note()
        self.step(backend)

    def step(self, backend: AttentionBackend) -> None:
        """Run `write_kv` and `attend` of every layer, without a note of the KV before it (for a capture)."""
        for cache, (q, k, v, out) in zip(self.caches, self.rows, strict=True):
            backend.write_kv(k, v, cache, self.batch)
            backend.attend(q, cache, self.batch, out)

    def captured(self, backend: AttentionBackend) -> Any:
        """Return the step that a graph captures: metadata, then every layer."""

        def whole() -> None:
            backend.write_metadata(self.batch)
            self.step(backend)

        return whole

    def note(self) -> None:
        """Keep the KV from before the step; `error` computes from it."""
        self.before = [(cache.k.clone(), cache.v.clone()) for cache in self.caches]

    def error(self) -> float:
        """Return the largest difference of a live output or a stored KV value from float64; infinite for NaN."""
        worst = 0.0
        for cache, (q, k, v, out), old in zip(self.caches, self.rows, self.before, strict=True):
            keys, values = (self._stored(*one) for one in ((old[0], k, cache.k_scale), (old[1], v, cache.v_scale)))
            # Padding rows write to the null page.
            worst = max(worst, _difference(cache.k[1:], keys[1:]), _difference(cache.v[1:], values[1:]))
            first = 0
            for one in self.live:
                mine = slice(first, first + one.rows)
                first += one.rows
                if one.rows:
                    expected = self._truth(one, q[mine], cache, keys, values)
                    worst = max(worst, _difference(out[mine], expected))
        return worst

    def _stored(self, pool: Tensor, rows: Tensor, scale: Tensor | None) -> Tensor:
        """Return the pool with the rows of live requests stored in it."""
        made = pool.clone().view(torch.uint8 if pool.element_size() == 1 else pool.dtype)
        cast = (rows if scale is None else rows.float() / scale).to(pool.dtype).view(made.dtype)
        first = 0
        for one in self.live:
            at = torch.arange(one.prefix, one.prefix + one.rows)
            page = torch.tensor(one.pages)[at // pool.shape[1]]
            made[page, at % pool.shape[1]] = cast[first : first + one.rows]
            first += one.rows
        return made.view(pool.dtype)

    def _truth(self, one: Request, q: Tensor, cache: KVCache, keys: Tensor, values: Tensor) -> Tensor:
        """Return the float64 output ``[rows, heads, head_dim]`` of one request."""
        a, total = self.shape.attention, one.prefix + one.rows
        at = torch.arange(total)
        page = torch.tensor(one.pages)[at // a.page_size]
        found = []
        for pool, scale in ((keys, cache.k_scale), (values, cache.v_scale)):
            mine = pool.float()[page, at % a.page_size].double()
            found.append((mine if scale is None else mine * scale.double()).repeat_interleave(a.group_size, 1))
        seen, depth = self._tail(one.rows)
        visible = torch.cat((torch.ones(one.rows, one.prefix, dtype=torch.bool), seen), 1)
        if a.window_left >= 0:
            where = torch.cat((torch.arange(one.prefix), one.prefix + depth))
            visible &= (one.prefix + depth)[:, None] - where <= a.window_left
        assert a.softmax_scale is not None
        scores = torch.einsum("qhd,nhd->hqn", q.double(), found[0]) * a.softmax_scale
        if a.logits_soft_cap:
            scores = a.logits_soft_cap * torch.tanh(scores / a.logits_soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = torch.full((a.num_qo_heads,), float("-inf")) if cache.sinks is None else cache.sinks
        weights = torch.cat((scores, sink.double().view(-1, 1, 1).expand(-1, one.rows, 1)), -1).softmax(-1)
        return torch.einsum("hqn,nhd->qhd", weights[..., :-1], found[1])

    def _tail(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return visibility bool ``[rows, rows]`` and depth ``[rows]`` of one request's tail."""
        if self.mode is Mode.DRAFT_BLOCK:
            return torch.ones(rows, rows, dtype=torch.bool), torch.arange(rows)
        if self.parents is None:
            return torch.ones(rows, rows, dtype=torch.bool).tril(), torch.arange(rows)
        seen, depth = torch.eye(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.int64)
        for node in range(1, rows):
            parent = self.parents[node]
            seen[node] |= seen[parent]
            depth[node] = depth[parent] + 1
        return seen, depth

    # -- the batch ----------------------------------------------------------------------------------------

    def _batch(self, buffers: BatchBuffers) -> ForwardBatch:
        assert self.host is not None
        n, tree = len(self.live), self.parents is not None
        if self.mode is Mode.EXTEND:
            table, lens = self._table(), torch.tensor([one.prefix for one in self.live], dtype=torch.int32)
            return ragged(self.shape, lens, table, tuple(one.rows for one in self.live), self.host)
        if self.mode is Mode.RAGGED_VERIFY:
            budget = self.budget or sum(one.rows for one in self.live)
            made = buffers.ragged_verify(budget, n, self.host, tree=tree, padded_reqs=self.padded)
        else:
            made = buffers.uniform(self.mode, 0, self.padded, n, self.host, tree=tree)
        self._fill(made)
        return made

    def _table(self) -> Tensor:
        table = torch.zeros(len(self.live), self.shape.max_pages_per_req, dtype=torch.int32)
        for row, one in zip(table, self.live, strict=True):
            row[: len(one.pages)] = torch.tensor(one.pages)
        return table

    def _fill(self, batch: ForwardBatch) -> None:
        n = len(self.live)
        batch.prefix_lens.zero_()
        batch.prefix_lens[:n] = torch.tensor([one.prefix for one in self.live])
        batch.page_table.zero_()
        batch.page_table[:n, : self.shape.max_pages_per_req] = self._table()
        counts = [one.rows for one in self.live] + [0] * (batch.padded_reqs - n)
        if self.mode is Mode.RAGGED_VERIFY:
            batch.q_indptr.copy_(torch.tensor([0, *counts]).cumsum(0))
        else:
            counts = list(batch.q_lens)
        batch.positions.zero_()
        if batch.slots is not None:
            batch.slots.fill_(-1)
        first = 0
        for r, rows in enumerate(counts):
            seen, depth = self._tail(rows)
            prefix, mine = (self.live[r].prefix if r < n else 0), slice(first, first + rows)
            first += rows
            batch.positions[mine] = prefix + depth
            if batch.slots is not None and r < n:
                at = torch.arange(prefix, prefix + rows)
                size = self.shape.attention.page_size
                batch.slots[mine] = torch.tensor(self.live[r].pages)[at // size] * size + at % size
            if isinstance(batch.tail, Tree):
                batch.tail.mask[mine] = _packed(seen, self.shape.mask_words)
                (batch.tail.depth[mine] if self.mode is Mode.RAGGED_VERIFY else batch.tail.depth[r]).copy_(depth)


def right(layout: str) -> LoadedBackend:
    """Return the backend of a layout without a defect."""
    return Mutant("none", "", "").build(layout)


def run(loaded: LoadedBackend, shape: Geometry, mode: Mode, live: list[Request], **more: Any) -> float:
    """Open the backend, run one forward on a pool of its own, and return its error."""
    pages = 1 + max(page for one in live for page in one.pages)
    caches = more.pop("caches", None) or pools(shape, pages)
    return Forward(shape, mode, live, caches, **more).run(loaded.open(shape, "cpu", guard=False))


def worst(count: int, shape: Geometry) -> Unknown:
    """Return host lengths that are unknown, as at a capture."""
    return Unknown(count, shape.max_prefix_len)


def _difference(got: Tensor, expected: Tensor) -> float:
    most = (got.double() - expected.double()).abs().max().item()
    return most if most == most else float("inf")  # NaN


def _packed(seen: Tensor, words: int) -> Tensor:
    """Pack bool ``[rows, T]`` into int32 ``[rows, words]``."""
    bits = torch.zeros(len(seen), words * 32, dtype=torch.int64)
    bits[:, : seen.shape[1]] = seen
    packed = (bits.view(-1, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()
