"""Scenes in KV pages: random K and V, stale numbers in every unused entry, and the four calls of a backend."""

from __future__ import annotations

import random

import torch

from draftmark import Form, Mode
from draftmark.backend import BoundBackend
from draftmark.batch import BatchBuffers, Chosen, ForwardBatch, Tree, ragged, validate
from draftmark.cache import KVCache

from .scenes import Scene, Slot, host_lengths


class PagedScene:
    """Puts the requests of a `Scene` into shuffled KV pages, and runs a backend on them.

    Unused KV is NaN. Each batch buffer contains stale numbers after its live part.

    Attributes:
        batch: the forward, over buffers that start with invalid numbers.
        cache: KV of prefix and older tail slots; the rows of this forward are not stored yet.
        k, v: expected KV, one ``[prefix + tail, num_kv_heads, head_dim]`` tensor per request, and ``[…, value_width]``.
    """

    def __init__(self, scene: Scene, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        self.scene, self.k, self.v = scene, k, v
        geometry, rng = scene.geometry, random.Random(scene.seed)
        a = geometry.attention
        self.table = self._place(rng)
        self.num_pages = 3 + sum(len(pages) for pages in self.table)
        self.batch = validate(self._batch(rng), geometry)
        self.cache, truths = self._unwritten(a.latent, Form.LATENT_PARTS in geometry.forms)
        for pages, truth in truths:
            pages[0] = 0.0
            for i, r in enumerate(scene.requests):
                old = r.total - r.rows
                if old:
                    stored = truth[i][:old].to(pages.dtype)
                    pages.flatten(0, 1)[self.slots(i, range(old))] = stored.view(old, *pages.shape[2:])

    def _unwritten(self, latent: bool, parts: bool) -> tuple[KVCache, list[tuple[torch.Tensor, list[torch.Tensor]]]]:
        """Return a cache of NaN, and each tensor of it with the expected KV that it stores, by request."""
        a = self.scene.geometry.attention
        width = a.value_width

        def nan(*rest: int) -> torch.Tensor:
            return torch.full((self.num_pages, a.page_size, *rest), float("nan"), dtype=getattr(torch, a.kv_dtype))

        if parts:
            cache = KVCache.latent((nan(width), nan(a.head_dim - width)))
            halves = [k[..., :width] for k in self.k], [k[..., width:] for k in self.k]
            return cache, list(zip(cache.parts, halves, strict=True))
        if latent:
            cache = KVCache.latent(nan(a.head_dim), value_dim=width)
            return cache, [(cache.k, self.k)]
        cache = KVCache(nan(a.num_kv_heads, a.head_dim), nan(a.num_kv_heads, width))
        return cache, [(cache.k, self.k), (cache.v, self.v)]

    def slots(self, request: int, keys: range) -> torch.Tensor:
        """Return the KV slots of a request's keys."""
        size = self.scene.geometry.attention.page_size
        return torch.tensor([self.table[request][key // size] * size + key % size for key in keys])

    def own_rows(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and V of this forward's rows for `write_kv`; padding rows get arbitrary finite numbers."""

        def rows(truth: list[torch.Tensor]) -> torch.Tensor:
            pad = torch.ones(self.batch.num_rows - len(self.scene.rows()), *truth[0].shape[1:])
            own = [truth[i][r.total - r.rows :] for i, r in enumerate(self.scene.requests)]
            return torch.cat([*own, pad]).to(dtype)

        return rows(self.k), None if self.scene.geometry.attention.latent else rows(self.v)

    def run(self, backend: BoundBackend, q: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Call the backend's four methods and return `out`, which starts as NaN; write `lse` if it is given."""
        k, v = self.own_rows(q.dtype)
        out = torch.full((*q.shape[:2], self.scene.geometry.attention.value_width), float("nan"), dtype=q.dtype)
        backend.plan(self.batch)
        backend.write_metadata(self.batch)
        backend.write_kv(k, v, self.cache, self.batch)
        backend.attend(q, self.cache, self.batch, out, *[] if lse is None else [lse])
        return out

    def _place(self, rng: random.Random) -> list[list[int]]:
        size = self.scene.geometry.attention.page_size
        counts = [-(-r.total // size) for r in self.scene.requests]
        ids = list(range(1, 1 + sum(counts)))
        rng.shuffle(ids)
        return [[ids.pop() for _ in range(count)] for count in counts]

    def _batch(self, rng: random.Random) -> ForwardBatch:
        scene, geometry = self.scene, self.scene.geometry
        live = len(scene.requests)
        padded = scene.padded_reqs or live
        dirty = BatchBuffers(geometry, "cpu")
        dirty.prefix_lens.fill_(10**6)
        dirty.page_table.fill_(self.num_pages - 1)
        dirty.mask.fill_(-1)
        dirty.depth.fill_(10**6)
        dirty.positions.fill_(10**6)
        prefix = [r.prefix for r in scene.requests] + [0] * (padded - live)
        dirty.prefix_lens[:padded] = torch.tensor(prefix)
        dirty.page_table[live:padded] = 0
        for i, pages in enumerate(self.table):
            dirty.page_table[i, : len(pages)] = torch.tensor(pages)
            stale = [rng.randrange(1, self.num_pages) for _ in range(geometry.max_pages_per_req - len(pages))]
            dirty.page_table[i, len(pages) :] = torch.tensor(stale)
        host = host_lengths(scene)
        if scene.mode is Mode.EXTEND:
            q_lens = tuple(r.rows for r in scene.requests) + (0,) * (padded - live)
            lists = dirty.chosen and Chosen(dirty.chosen.slots[: sum(q_lens)], dirty.chosen.counts[: sum(q_lens)])
            placed = dirty.prefix_lens[:padded], dirty.page_table[:padded]
            return ragged(geometry, *placed, q_lens, host, live, chosen=lists)
        if scene.mode is Mode.RAGGED_VERIFY:
            budget, indptr = geometry.max_rows(scene.mode), [0]
            for n in [r.rows for r in scene.requests] + [0] * (padded - live):
                indptr.append(indptr[-1] + n)
            assert dirty.q_indptr is not None
            dirty.q_indptr[: padded + 1] = torch.tensor(indptr)
            batch = dirty.ragged_verify(budget, live, host, tree=not scene.causal, padded_reqs=padded)
        else:
            batch = dirty.uniform(scene.mode, scene.step, padded, live, host, tree=not scene.causal)
        self._fill(batch)
        return batch

    def _fill(self, batch: ForwardBatch) -> None:
        scene, wall = self.scene, self.scene.geometry.limits.max_context_len - 1
        q, t = batch.q_lens[0], batch.tail_lens[0]
        tails = [(r.prefix, r.tail, r.rows) for r in scene.requests]
        if scene.mode is not Mode.RAGGED_VERIFY:
            alone = tuple(Slot(s, frozenset({s})) for s in range(t))
            tails += [(0, alone, q)] * (batch.padded_reqs - len(tails))
        rows = [(prefix, slot) for prefix, tail, own in tails for slot in tail[len(tail) - own :]]
        batch.positions[: len(rows)] = torch.tensor([min(prefix + slot.depth, wall) for prefix, slot in rows]).long()
        if isinstance(batch.tail, Tree) and rows:
            words = range(scene.geometry.mask_words)
            bits = [sum(1 << s for s in slot.sees) for _, slot in rows]
            packed = torch.tensor([[(b >> 32 * w) & 0xFFFFFFFF for w in words] for b in bits])
            batch.tail.mask[: len(rows)] = torch.where(packed >= 2**31, packed - 2**32, packed)
            if scene.mode is Mode.RAGGED_VERIFY:
                batch.tail.depth[: len(rows)] = torch.tensor([slot.depth for _, slot in rows])
            else:
                batch.tail.depth[:] = torch.tensor([[slot.depth for slot in tail] for _, tail, _ in tails])


def random_paged_scene(scene: Scene) -> tuple[PagedScene, torch.Tensor]:
    """Return the scene in pages with random K and V, and random q for its rows."""
    a, dice = scene.geometry.attention, torch.Generator().manual_seed(scene.seed)

    def numbers(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, a.head_dim, generator=dice).to(getattr(torch, a.q_dtype))

    k, v = ([numbers(r.total, a.num_kv_heads) for r in scene.requests] for _ in range(2))
    v = [(keys if a.latent else values)[..., : a.value_width] for keys, values in zip(k, v, strict=True)]
    paged = PagedScene(scene, k, v)
    return paged, numbers(paged.batch.num_rows, a.num_qo_heads)
