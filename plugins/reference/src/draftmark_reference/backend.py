"""Methods of the reference backend: plan widths, write two index buffers, scatter KV, attend."""

from __future__ import annotations

import torch

from draftmark import FP8_DS_MLA, Form, Geometry, Mode
from draftmark.runtime import Arena, Block, ForwardBatch, KVCache, Tree, sinks_of

from .attention import Keys, attend_block, block_visibility, causal_visibility, tree_visibility, unpack_bits
from .chosen import attend_chosen
from .row_format import numbers


class ReferenceBackend:
    """Backend in plain torch, with one code path for eager mode, capture and replay. Never reads the device."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._kv_lens = arena["kv_lens"]
        self._slots = arena["slot_mapping"]
        self._widths: tuple[int, ...] = ()
        self._one_by_one = geometry.limits.batch_invariant
        self._parts = Form.LATENT_PARTS in geometry.forms

    def plan(self, batch: ForwardBatch) -> None:
        """Compute the number of pages to gather per request from the host's length bound plus the tail."""
        bounds = (*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs))
        pages = [self.geometry.pages_for(n, t) for n, t in zip(bounds, batch.tail_lens, strict=True)]
        # A bound may exceed a request's real length and the table's width; the width is enough for every real length.
        # A matrix product's rounding depends on its width, so batch invariance needs one width for all requests.
        widest = self.geometry.max_pages_per_req
        self._widths = tuple(widest if self._one_by_one else min(n, widest) for n in pages)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write each request's KV length (prefix + tail), and each row's KV slot: rows are the last tail slots."""
        page_size = self.geometry.attention.page_size
        q_lens = batch.q_indptr.diff()
        tail_lens = torch.full_like(q_lens, batch.tail_lens[0]) if batch.uniform else q_lens
        kv_lens = self._kv_lens[: batch.padded_reqs]
        torch.add(batch.prefix_lens, tail_lens, out=kv_lens)
        if batch.slots is not None:
            self._slots[: batch.num_rows].copy_(batch.slots)
            return
        rows, request, owned = _rows(batch)
        position = (kv_lens[request] - (batch.q_indptr[request + 1] - rows)).long()
        page = batch.page_table[request, torch.where(owned, position // page_size, 0)].long()
        slots = page * page_size + position % page_size
        self._slots[: batch.num_rows].copy_(torch.where(owned, slots, -1))

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Write the rows to their slots. A row with slot -1 repeats the write of the first row that has a slot.

        A latent layer has no v: its whole rows are k, stored in one buffer or two.
        """
        slots, page_size = self._slots[: batch.num_rows], self.geometry.attention.page_size
        stores = slots >= 0
        first = stores.int().argmax()
        source = torch.where(stores, torch.arange(len(slots), device=slots.device), first)
        # If no row has a slot, the target is slot 0, which is overwritten with its own contents.
        target = slots[source].clamp(min=0)
        at = target // page_size, target % page_size
        for rows, pages in self._stores(k, v, cache):
            pages.index_put_(at, torch.where(stores.any(), rows.to(pages.dtype)[source], pages[at]))

    def _stores(
        self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pairs of rows and the pages that store them."""
        if v is not None:
            return [(k, cache.k), (v, cache.v)]
        if not self._parts:
            return [(k, cache.k)]
        return list(zip(k[:, 0].tensor_split([self.geometry.attention.value_width], -1), cache.parts, strict=True))

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Compute attention of uniform modes in one call, and of EXTEND request by request.

        With `Limits.batch_invariant` every mode computes request by request, in products of one shape. A layer with
        chosen keys computes row by row in every mode.
        """
        if self.geometry.attention.chosen_width:
            attend_chosen(self.geometry, q, cache, batch, out, lse, sinks_of(cache, self.geometry))
            return
        if batch.mode is Mode.RAGGED_VERIFY:
            self._attend_ragged(q, cache, batch, out, lse)
            return
        if batch.uniform:
            q_len = batch.q_lens[0]
            for some in self._together(batch):
                rows = slice(some.start * q_len, some.stop * q_len)
                outputs = out[rows], None if lse is None else lse[rows]
                self._attend_block(q[rows], cache, batch, outputs, some, q_len, max(self._widths))
            return
        first = 0
        for request, n in enumerate(batch.q_lens):
            if n:
                rows, one = slice(first, first + n), slice(request, request + 1)
                outputs = out[rows], None if lse is None else lse[rows]
                self._attend_block(q[rows], cache, batch, outputs, one, n, self._widths[request])
            first += n

    def _together(self, batch: ForwardBatch) -> list[slice]:
        """Return the requests that one call computes together: all of them, or each one for batch invariance."""
        if self._one_by_one:
            return [slice(request, request + 1) for request in range(batch.padded_reqs)]
        return [slice(0, batch.padded_reqs)]

    def _attend_block(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        outputs: tuple[torch.Tensor, torch.Tensor | None],
        requests: slice,
        q_len: int,
        pages: int,
    ) -> None:
        """Compute `outputs` (out, lse) of `requests` with q_len rows each; each reads `pages` pages of its table."""
        table, kv_lens = batch.page_table[requests, :pages], self._kv_lens[requests]
        keys = self._gather(cache, table, batch.prefix_lens[requests], kv_lens)
        shape = self.geometry.attention
        if isinstance(batch.tail, Block):
            seen = block_visibility(kv_lens, q_len, keys.width, shape.window_left)
        elif isinstance(batch.tail, Tree):
            depth, tail_len = batch.tail.depth[requests], batch.tail.depth.shape[1]
            words = batch.tail.mask[requests.start * q_len : requests.stop * q_len]
            bits = unpack_bits(words, tail_len).view(-1, q_len, tail_len)
            seen = tree_visibility(kv_lens - tail_len, keys.width, bits, depth, shape.window_left)
        else:
            positions = (kv_lens - q_len)[:, None] + torch.arange(q_len, dtype=torch.int32, device=q.device)
            seen = causal_visibility(positions, keys.width, shape.window_left)
        block, (out, lse) = (len(table), q_len, q.shape[1]), outputs
        attend_block(
            q.view(*block, -1), keys, seen, shape, out.view(*block, -1), sinks_of(cache, self.geometry),
            None if lse is None else lse.view(block),
        )  # fmt: skip

    def _attend_ragged(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Compute attention of a ragged batch: pad each request to the largest row bound, then drop padding rows."""
        most, requests = max(batch.q_lens), batch.padded_reqs
        if self._one_by_one:
            most = self.geometry.extent(batch.mode).q_len
        if not most:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
            return
        width, shape = max(self._widths), self.geometry.attention
        keys_len = width * shape.page_size
        slot = torch.arange(most, device=q.device)
        q_lens = batch.q_indptr.diff()[:, None]
        source = (batch.q_indptr[:-1, None] + slot).clamp(max=batch.num_rows - 1).view(-1)
        live = slot < q_lens
        if isinstance(batch.tail, Tree):
            bits = unpack_bits(batch.tail.mask, most)[source].view(requests, most, most) & live[:, :, None]
            depth = torch.where(live, batch.tail.depth[source].view(requests, most), 0)
        else:
            bits, depth = (slot <= slot[:, None]).expand(requests, -1, -1), slot.int().expand(requests, -1)
        # A padding row sees the first key, because the softmax of an empty row is NaN.
        seen = tree_visibility(batch.prefix_lens, keys_len + most, bits, depth, shape.window_left)[..., :keys_len]
        seen[..., 0] |= ~live
        block = torch.empty(requests, most, *out.shape[1:], dtype=out.dtype, device=out.device)
        sums = None if lse is None else torch.empty(requests, most, lse.shape[1], dtype=lse.dtype, device=lse.device)
        queries, sinks = q[source].view(*block.shape[:3], -1), sinks_of(cache, self.geometry)
        for some in self._together(batch):
            table = batch.page_table[some, :width]
            keys = self._gather(cache, table, batch.prefix_lens[some], self._kv_lens[some])
            some_sums = None if sums is None else sums[some]
            attend_block(queries[some], keys, seen[some], shape, block[some], sinks, some_sums)
        rows, request, owned = _rows(batch)
        row = torch.where(owned, rows - batch.q_indptr[request], 0)
        out.copy_(torch.where(owned[:, None, None], block[request, row], 0))
        if lse is not None and sums is not None:
            lse.copy_(torch.where(owned[:, None], sums[request, row], float("-inf")))

    def _gather(self, cache: KVCache, table: torch.Tensor, prefix_lens: torch.Tensor, kv_lens: torch.Tensor) -> Keys:
        """Return KV of the pages in `table`, heads first, with V set to 0 at positions that no row can see.

        In a latent layer V is a view of K, which is therefore set to 0 there, too.

        These are the positions that were never written, and with a window the positions left of it.
        """
        shape = self.geometry.attention
        if self._parts:
            k = torch.cat([_pages(part.unsqueeze(2), table) for part in cache.parts], -1)
        elif shape.row_format == FP8_DS_MLA:
            k = numbers(_gathered(cache.k.view(torch.uint8), table), shape.value_width).permute(2, 0, 1, 3)
        else:
            k = _pages(cache.k, table)
        v = k[..., : shape.value_width] if shape.latent else _pages(cache.v, table)
        # A NaN in an unused K is harmless, because its score is overwritten. In V it would yield 0 · NaN (vllm#43961).
        # A bitwise AND clears NaN too: (position - length) >> 31 is all ones at written positions, 0 elsewhere.
        position = torch.arange(k.shape[2], dtype=torch.int32, device=table.device)
        used = (position - kv_lens[:, None]) >> 31
        window = shape.window_left
        if window >= 0:
            used &= (prefix_lens[:, None] - window - 1 - position) >> 31
        v.view(torch.int32).bitwise_and_(used[:, :, None])
        return Keys(k, v)


def _rows(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's index, its request, and True if a request owns it (the last rows of a budget are padding)."""
    rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
    request = torch.searchsorted(batch.q_indptr, rows, right=True) - 1
    return rows, request.clamp(max=batch.padded_reqs - 1), rows < batch.q_indptr[-1]


def _pages(tensor: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Gather ``[num_pages, P, heads, dim]`` by ids ``[R, n]`` into a new float32 ``[heads, R, n·P, dim]``."""
    # Gather before permuting: index_select of a permuted tensor would copy the whole pool first.
    return _gathered(tensor, table).float().permute(2, 0, 1, 3)


def _gathered(tensor: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Gather ``[num_pages, P, heads, dim]`` by ids ``[R, n]`` into a new ``[R, n·P, heads, dim]``."""
    requests, pages = table.shape
    return tensor.index_select(0, table.reshape(-1)).view(requests, pages * tensor.shape[1], *tensor.shape[2:])
