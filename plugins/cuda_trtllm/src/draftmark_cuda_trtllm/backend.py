"""Backend over TensorRT-LLM's XQA kernels, for sm_90, sm_120 and sm_121.

cuda_triton's kernels run three modes that XQA cannot run:

* EXTEND: XQA has no causal prefill, and FlashInfer's prefill needs host lengths and a plan.
* RAGGED_VERIFY: the device chooses each request's number of rows.
* DRAFT_BLOCK: a row also sees later rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import BatchError, Geometry, Mode, ceil_div
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree, record_call, sinks_of
from draftmark_cuda_triton.shared import DecodeVerify, Prefill, prepare, write_kv

from . import forms, launch, sizing
from .xqa import Xqa

HEADS_OF_POOL = 1 << 32
"""Upper bound of the heads in a KV pool: XQA multiplies page id and page stride, counted in heads, in 32 bits."""


class XqaBackend:
    """XQA backend with one code path for eager mode, capture and replay; it never reads the device on the host.

    On CPU tensors, Triton's interpreter runs `write_metadata`, `write_kv` and EXTEND. XQA itself needs a GPU.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        a = geometry.attention
        self.geometry = geometry
        self.arena = arena
        self._buffer = {name: arena[name] for name in arena}
        scale = a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5
        # XQA divides the logits by sqrt(head_dim) itself, so this factor cancels the division.
        self._factor = scale * a.head_dim**0.5
        slots = self._buffer[sizing.SLOTS]
        own = [mode for mode in geometry.modes if mode is Mode.EXTEND or mode in forms.sibling_modes(geometry)]
        if own:
            prepare(replace(geometry, modes=tuple(own)), slots.device)
        if Mode.EXTEND in geometry.modes:
            self._prefill = Prefill(geometry, slots, self._buffer[sizing.ROW_TILES])
        if forms.sibling_modes(geometry):
            self._decode_verify = DecodeVerify(geometry, slots, self._buffer)
        self._xqa = self._open() if slots.is_cuda and forms.uniform_modes(geometry) else None

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: XQA has no plan, and lengths are on the device."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write KV lengths (committed and new tokens), slots and masks, in one launch.

        Eager mode, capture and replay run the same launch.
        """
        if sibling := self._sibling(batch):
            sibling.write_metadata(batch)
            return
        slots = self._buffer[sizing.SLOTS][: batch.num_rows]
        extent = self.geometry.extent(batch.mode, batch.step)
        lens = self._buffer[sizing.LENS][: batch.padded_reqs]
        masked = batch.mode in forms.masked_modes(self.geometry)
        tree = batch.tail.mask if isinstance(batch.tail, Tree) and masked else None
        indptr, mask = (self._buffer[name] if masked else None for name in (sizing.INDPTR, sizing.MASK))
        record_call(
            launch.write_uniform, self.geometry.attention.page_size,
            (extent.q_len, extent.tail_len, forms.lanes(batch.mode, extent.q_len, extent.tail_len)),
            batch.prefix_lens, batch.page_table, tree, lens, slots, indptr, mask,
            forms.mask_words(self.geometry, batch.mode) if masked else 1,
            mutates=[one for one in (lens, slots, indptr, mask) if one is not None],
        )  # fmt: skip
        if batch.slots is not None:
            slots.copy_(batch.slots)
        launch.hide_pages(self.geometry, batch, self._table(batch))

    def _table(self, batch: ForwardBatch) -> torch.Tensor:
        return launch.visible_table(self.geometry, self._buffer, batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store K and V of the batch's rows in one launch; quantise them if the cache is fp8."""
        slots = self._buffer[sizing.SLOTS][: batch.num_rows]
        if batch.num_rows:
            record_call(
                write_kv, k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots, mutates=(cache.k, cache.v)
            )

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention in one launch. A draft step with more tail slots than rows also stages its rows.

        Tail slots are the draft tokens that a request has so far. Staging copies the rows and adds padding rows.
        """
        if sibling := self._sibling(batch):
            sibling.attend(q, cache, batch, out)
            return
        if self._xqa is None:
            raise BatchError("XQA runs on a CUDA device, but the arena is on the CPU; open the backend on cuda")
        self._check(cache, batch, out)
        q, scales, sinks = q.contiguous(), self._scales(cache), sinks_of(cache, self.geometry)
        lens, table = self._buffer[sizing.LENS][: batch.padded_reqs], self._table(batch)
        q_len, tail_len = batch.q_lens[0], batch.tail_lens[0]
        if q_len == 1 and not forms.is_fp8(self.geometry):
            self._xqa.decode(q, cache, table, lens, out, scales, sinks)
            return
        rows = forms.q_rows(self.geometry, batch.mode)
        lanes = forms.lanes(batch.mode, q_len, tail_len)
        if batch.padded_reqs == 1 and forms.fills_blocks(self.geometry, q_len, rows):
            # The rows of a single request need no distance to a next request's rows, and no block of the kernel reads
            # padding rows. So the rows are not staged.
            lanes = q_len
        into, from_ = (q, out) if lanes == q_len else self._staged(q, batch.padded_reqs, q_len, lanes)
        indptr = self._buffer[sizing.INDPTR][: batch.padded_reqs + 1]
        self._xqa.tree(into, cache, table, lens, from_, scales, rows, indptr, self._buffer[sizing.MASK], sinks)
        if lanes != q_len:
            launch.move_rows(from_, out, batch.num_rows, q_len, (lanes, q_len))

    def _sibling(self, batch: ForwardBatch) -> Prefill | DecodeVerify | None:
        """Return cuda_triton's backend for a mode that XQA cannot run, else None."""
        if batch.mode is Mode.EXTEND:
            return self._prefill
        return self._decode_verify if batch.mode in forms.SIBLING_MODES else None

    def _staged(self, q: torch.Tensor, requests: int, q_len: int, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return staging buffers for queries and outputs with `lanes` rows per request.

        The queries are copied; each request's real rows come first, then padding rows.
        """
        queries, outputs = (self._buffer[name][: requests * lanes] for name in (sizing.QUERIES, sizing.OUTPUTS))
        launch.move_rows(q, queries, requests * q_len, q_len, (q_len, lanes))
        return queries, outputs

    def _scales(self, cache: KVCache) -> tuple[Any, Any]:
        """Return XQA's (q_scale, kv_scale). XQA multiplies logits by q_scale · kv_scale, and outputs by kv_scale."""
        kv_scale = 1.0 if cache.v_scale is None else cache.v_scale
        if cache.k_scale is cache.v_scale:
            return self._factor, kv_scale
        q_scale = self._buffer[sizing.Q_SCALE]
        launch.write_scale(cache.k_scale, cache.v_scale, q_scale, self._factor)
        return q_scale, kv_scale

    def _check(self, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if not out.is_contiguous() or not batch.page_table.is_contiguous():
            raise BatchError("out and page_table must be contiguous, as XQA reads no strides of theirs; copy them")
        heads = cache.k.shape[0] * cache.k.shape[1] * cache.k.shape[2]
        if heads >= HEADS_OF_POOL:
            raise BatchError(
                f"the pool has {heads} heads (pages · page_size · KV heads), but XQA counts them in 32 bits; "
                "use fewer pages a pool"
            )
        windowed = self.geometry.attention.window_left >= 0
        if isinstance(batch.tail, Tree) and windowed and batch.uniform and batch.q_lens[0] > 1:
            raise BatchError("the tail is a Tree under a window, whose rows XQA would place as a chain's; pass Causal")

    def _open(self) -> Xqa:
        """Build, load and run every kernel of the geometry once, then return the bound XQA function."""
        from flashinfer.xqa import xqa

        a = self.geometry.attention
        bound = Xqa(
            xqa, a.num_kv_heads, a.page_size, a.window_left + 1, self.geometry.device.num_sms,
            self._buffer[sizing.SCRATCH], self._buffer[sizing.SEMAPHORES],
        )  # fmt: skip
        for rows in forms.kernels(self.geometry):
            self._run_once(bound, rows)
        return bound

    def _run_once(self, xqa: Xqa, rows: int) -> None:
        """Run one kernel on a request with one key. The first call builds a module, which a capture does not permit."""
        a, device = self.geometry.attention, xqa.scratch.device
        q = torch.zeros(rows, a.num_qo_heads, a.head_dim, dtype=getattr(torch, a.q_dtype), device=device)
        pages = torch.zeros(
            2, 1, a.page_size, a.num_kv_heads, a.head_dim, dtype=getattr(torch, a.q_dtype), device=device
        ).to(getattr(torch, a.kv_dtype))
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        lens = torch.ones(1, dtype=torch.int32, device=device)
        cache = KVCache(pages[0], pages[1])
        if rows == 1:
            xqa.decode(q, cache, table, lens, torch.empty_like(q), (self._factor, 1.0))
            return
        indptr = torch.arange(2, dtype=torch.int32, device=device)
        mask = torch.ones(ceil_div(rows, forms.MASK_BITS), dtype=torch.int32, device=device)
        xqa.tree(q[:1], cache, table, lens, torch.empty_like(q[:1]), (self._factor, 1.0), rows, indptr, mask)
