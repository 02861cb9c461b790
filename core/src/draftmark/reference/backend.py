"""The reference's step path: plan a width, write two index buffers, scatter KV, attend."""

from __future__ import annotations

import torch

from ..arena import Arena
from ..batch import Causal, ForwardBatch, Tree
from ..cache import KVCache
from ..geometry import Geometry, Mode
from .attention import Keys, attend_block, causal_bits, unpack_bits, visibility


class ReferenceBackend:
    """Plain torch. One code path for eager, capture and replay; it never reads the device on the host."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._kv_lens = arena["kv_lens"]
        self._slots = arena["slot_mapping"]
        self._widths: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        """Choose how many pages to gather per request: the host's bound plus the tail. Never a length itself."""
        bounds = (*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs))
        pages = [self.geometry.pages_for(n, t) for n, t in zip(bounds, batch.tail_lens, strict=True)]
        # A bound may be loose, as L + n <= C is not known for each request; the table is wide enough for all.
        self._widths = tuple(min(n, self.geometry.max_pages_per_req) for n in pages)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """kv_lens[r] = L + T, and the KV slot of every row: position L + T - q + j."""
        page_size = self.geometry.attention.page_size
        q_lens = batch.q_indptr.diff()
        extent = batch.uniform
        tail_lens = q_lens if extent is None else torch.full_like(q_lens, extent.tail_len)
        kv_lens = self._kv_lens[: batch.padded_reqs]
        torch.add(batch.prefix_lens, tail_lens, out=kv_lens)

        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, rows, right=True) - 1
        from_end = batch.q_indptr[request + 1] - rows
        position = (kv_lens[request] - from_end).long()
        page = batch.page_table[request, position // page_size].long()
        self._slots[: batch.num_rows].copy_(page * page_size + position % page_size)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Scatter the rows to their slots."""
        slots = self._slots[: batch.num_rows]
        for rows, pages in ((k, cache.k), (v, cache.v)):
            pages.flatten(0, 1).index_copy_(0, slots, rows.to(pages.dtype))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Uniform modes as one block; EXTEND request by request, since its requests differ in rows."""
        extent = batch.uniform
        if extent is not None:
            self._attend_uniform(q, cache, batch, out)
            return
        first = 0
        for request, n in enumerate(batch.q_lens):
            rows = slice(first, first + n)
            if n:
                self._attend_extend(request, q[rows], cache, batch, out[rows])
            first += n

    def _attend_uniform(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        q_len, tail_len = batch.q_lens[0], batch.tail_lens[0]
        requests = batch.padded_reqs
        keys = self._gather(cache, batch, slice(0, requests), max(self._widths))
        if isinstance(batch.tail, Tree):
            bits = unpack_bits(batch.tail.mask, tail_len).view(requests, q_len, tail_len)
            depth = batch.tail.depth
        else:
            bits = causal_bits(q_len, tail_len, q.device).expand(requests, q_len, tail_len)
            depth = torch.arange(tail_len, device=q.device).expand(requests, tail_len)
        seen = visibility(batch.prefix_lens, keys.width, bits, depth, self.geometry.attention.window_left)
        block = q.view(requests, q_len, *q.shape[1:])
        out.copy_(attend_block(block, keys, seen, self.geometry.attention).view_as(out))

    def _attend_extend(
        self, request: int, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        assert batch.mode is Mode.EXTEND and isinstance(batch.tail, Causal)
        one = slice(request, request + 1)
        n = q.shape[0]
        keys = self._gather(cache, batch, one, self._widths[request])
        bits = causal_bits(n, n, q.device).unsqueeze(0)
        depth = torch.arange(n, device=q.device).unsqueeze(0)
        seen = visibility(batch.prefix_lens[one], keys.width, bits, depth, self.geometry.attention.window_left)
        out.copy_(attend_block(q.unsqueeze(0), keys, seen, self.geometry.attention)[0])

    def _gather(self, cache: KVCache, batch: ForwardBatch, requests: slice, pages: int) -> Keys:
        """The first `pages` pages of some requests, head-major, with the positions nobody wrote zeroed in V."""
        table = batch.page_table[requests, :pages]
        stored = torch.arange(pages * cache.k.shape[1], device=table.device) < self._kv_lens[requests, None]
        k, v = (_pages(tensor, table) for tensor in (cache.k, cache.v))
        # A masked score is overwritten, so a NaN in an unused K is harmless; in V it is 0 · NaN (vllm#43961).
        v.masked_fill_(~stored[None, :, :, None], 0.0)
        return Keys(k, v)


def _pages(tensor: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``[num_pages, P, heads, dim]`` and ids ``[R, n]`` → float32 ``[heads, R, n·P, dim]``, a fresh tensor."""
    requests, pages = table.shape
    gathered = tensor.permute(2, 0, 1, 3).index_select(1, table.reshape(-1))
    return gathered.float().view(tensor.shape[2], requests, pages * tensor.shape[1], tensor.shape[3])
