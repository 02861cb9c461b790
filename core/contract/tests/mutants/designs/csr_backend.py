"""A correct backend in the CSR layout: concatenated pages of all requests, an indptr, and its own tail mask.

The reference reads the batch's page table and mask in place. This backend copies everything that attention reads to
its own buffers, as engines with CSR kernels do. Mutants can then break each buffer.
"""

from __future__ import annotations

import torch

from draftmark import AttentionShape, Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree, sinks_of

from . import csr_attention as kernel
from .csr_plugin import MASKED


class CsrBackend:
    """Step methods of the CSR backend. `attend` reads only the arena, no tensor of the batch."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._widths: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        """Compute the number of pages to gather for each request, from the host's length bounds."""
        live = zip(batch.host.upper_bound(), batch.tail_lens, strict=False)
        widths = [self.geometry.pages_for(n, t) for n, t in live]
        self._widths = (*widths, *(self.geometry.pages_for(0, t) for t in batch.tail_lens[batch.num_reqs :]))
        if self.geometry.limits.batch_invariant:
            self._widths = (self.geometry.max_pages_per_req,) * len(self._widths)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write all buffers of the arena for this batch."""
        r, size = batch.padded_reqs, self.geometry.attention.page_size
        q_lens = batch.q_indptr.diff()
        tails = torch.full_like(q_lens, batch.tail_lens[0]) if batch.uniform else q_lens
        lens = batch.prefix_lens + tails
        pages = (lens + size - 1) // size
        indptr = self.arena["kv_indptr"][: r + 1]
        indptr[0] = 0
        torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
        self.arena["kv_last_page_len"][:r] = lens - (pages - 1) * size
        self.arena["qo_indptr"][: r + 1] = batch.q_indptr
        self._write_indices(batch, indptr)
        self._write_slots(batch, lens)
        if batch.mode in MASKED:
            self._write_tail(batch)

    def _write_indices(self, batch: ForwardBatch, indptr: torch.Tensor) -> None:
        columns = batch.page_table.shape[1]
        entry = torch.arange(batch.padded_reqs * columns, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(indptr[1:], entry, right=True).clamp(max=batch.padded_reqs - 1)
        column = (entry - indptr[request]).clamp(max=columns - 1)
        page = torch.where(entry < indptr[-1], batch.page_table[request, column.long()], 0)
        self.arena["kv_indices"][: entry.shape[0]] = page

    def _write_slots(self, batch: ForwardBatch, lens: torch.Tensor) -> None:
        size = self.geometry.attention.page_size
        row = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, row, right=True) - 1
        position = (lens[request] - (batch.q_indptr[request + 1] - row)).long()
        page = batch.page_table[request, position // size].long()
        self.arena["slot_mapping"][: batch.num_rows] = page * size + position % size

    def _write_tail(self, batch: ForwardBatch) -> None:
        r, tail, rows = batch.padded_reqs, batch.tail_lens[0], batch.num_rows
        mask, depth = self.arena["tail_mask"][:rows], self.arena["tail_depth"][:r, :tail]
        if isinstance(batch.tail, Tree):
            mask.copy_(batch.tail.mask)
            depth.copy_(batch.tail.depth)
            return
        own = torch.arange(tail - batch.q_lens[0], tail, device=batch.device).repeat(r)
        first = torch.arange(mask.shape[1], device=batch.device) * 32
        count = (own[:, None] + 1 - first).clamp(0, 32)
        mask.copy_(torch.bitwise_left_shift(torch.ones_like(count), count) - 1)
        depth.copy_(torch.arange(tail, device=batch.device).expand(r, tail))

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Write the rows' K and V to their cache slots."""
        slots = self.arena["slot_mapping"][: batch.num_rows]
        for rows, pages, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
            stored = kernel.stored(rows, scale, pages.dtype)
            kernel.indexable(pages).flatten(0, 1).index_copy_(0, slots, kernel.indexable(stored))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attend to all requests at once in uniform modes, and to one request after another in EXTEND.

        With `Limits.batch_invariant` every mode attends to one request after another.
        """
        r, first = batch.padded_reqs, 0
        if batch.uniform:
            bits, depth = self._tail(batch)
            block = q.view(r, batch.q_lens[0], *q.shape[1:])
            together = 1 if self.geometry.limits.batch_invariant else r
            for begin in range(0, r, together):
                some, width = slice(begin, begin + together), max(self._widths)
                found = self._attend(block[some], cache, some, width, bits[some], depth[some])
                out.view_as(block)[some].copy_(found)
            return
        for request, n in enumerate(batch.q_lens):
            if n:
                one, rows = slice(request, request + 1), slice(first, first + n)
                bits, depth = kernel.causal_bits(n, n, q.device), torch.arange(n, device=q.device)[None]
                out[rows].copy_(self._attend(q[rows][None], cache, one, self._widths[request], bits, depth)[0])
            first += n

    def _tail(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return visibility ``[R, q, T]`` and depth ``[R, T]`` of the new tokens (T per request) of a uniform batch."""
        r, rows, tail = batch.padded_reqs, batch.q_lens[0], batch.tail_lens[0]
        if batch.mode in MASKED:
            words = self.arena["tail_mask"][: batch.num_rows].view(r, rows, -1)
            return kernel.mask_bits(words, tail), self.arena["tail_depth"][:r, :tail]
        depth = torch.arange(tail, device=batch.device).expand(r, tail)
        return kernel.causal_bits(rows, tail, batch.device).expand(r, rows, tail), depth

    def _attend(
        self, q: torch.Tensor, cache: KVCache, one: slice, pages: int, bits: torch.Tensor, depth: torch.Tensor
    ) -> torch.Tensor:
        shape: AttentionShape = self.geometry.attention
        indptr, last = self.arena["kv_indptr"], self.arena["kv_last_page_len"][one]
        start, stop = indptr[:-1][one], indptr[1:][one]
        lens = (stop - start - 1) * shape.page_size + last
        index = (start[:, None] + torch.arange(pages, device=q.device)).clamp(max=self.arena["kv_indices"].shape[0] - 1)
        # Index entries beyond the live pages may hold garbage. Their keys are masked, so any valid page id is safe.
        table = self.arena["kv_indices"][index.long()].clamp(0, cache.k.shape[0] - 1).long()
        k = kernel.gathered(cache.k, table, cache.k_scale)
        v = kernel.gathered(cache.v, table, cache.v_scale)
        prefix = lens - bits.shape[2]
        used = kernel.used(prefix, lens, k.shape[1], shape.window_left)
        v = v.masked_fill(~used[:, :, None, None], 0.0)
        seen = kernel.visible(prefix, k.shape[1], bits, depth, shape.window_left)
        return kernel.attend(q, k, v, seen, shape, sinks_of(cache, self.geometry))
