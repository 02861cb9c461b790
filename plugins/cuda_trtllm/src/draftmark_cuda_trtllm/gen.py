"""Backend over trtllm-gen, for sm_100 and sm_103: chains of drafts only, with trtllm-gen's context kernels for EXTEND.

It was never run on hardware. The calls follow FlashInfer 0.7's signatures. The kernels are downloaded binaries, so
they must be in FlashInfer's cubin directory before the backend opens on these GPUs.
"""

from __future__ import annotations

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree, record_call, sinks_of
from draftmark_cuda_triton.shared import write_kv

from . import gen_sizing as sizing
from . import launch


class GenBackend:
    """trtllm-gen backend, with the interface of `backend.XqaBackend`. It has no masks, so drafts must be chains."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._buffer = {name: arena[name] for name in arena}
        a = geometry.attention
        self._scale = a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5
        self._decode = self._context = None
        if arena[sizing.LENS].is_cuda:
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache
            from flashinfer.prefill import trtllm_batch_context_with_kv_cache

            self._decode, self._context = trtllm_batch_decode_with_kv_cache, trtllm_batch_context_with_kv_cache

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: lengths are on the device."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write KV lengths (committed and new tokens) and slots, in one launch."""
        launch.hide_pages(self.geometry, batch, self._table(batch))
        page, slots = self.geometry.attention.page_size, self._buffer[sizing.SLOTS][: batch.num_rows]
        lens = self._buffer[sizing.LENS][: batch.padded_reqs]
        if not batch.uniform:
            sums = self._buffer[sizing.KV_INDPTR][: batch.padded_reqs + 1]
            record_call(
                launch.write_context, page, batch.prefix_lens, batch.q_indptr, batch.page_table, slots, lens, sums,
                mutates=(slots, lens, sums),
            )  # fmt: skip
            return
        q_len = batch.q_lens[0]
        record_call(
            launch.write_uniform, page, (q_len, batch.tail_lens[0], q_len), batch.prefix_lens,
            batch.page_table, None, lens, slots, None, None, 1, mutates=(lens, slots),
        )  # fmt: skip

    def _table(self, batch: ForwardBatch) -> torch.Tensor:
        return launch.visible_table(self.geometry, self._buffer, batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store K and V of the batch's rows at their slots, in one launch."""
        slots = self._buffer[sizing.SLOTS][: batch.num_rows]
        if batch.num_rows:
            record_call(write_kv, k, v, cache.k, cache.v, None, None, slots, mutates=(cache.k, cache.v))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention with one call of FlashInfer."""
        if self._decode is None or self._context is None:
            raise BatchError("attend runs on a CUDA device, but the arena is on the CPU; open the backend on cuda")
        if isinstance(batch.tail, Tree):
            raise BatchError("the tail is a Tree, but trtllm-gen ignores masks; pass Causal, or use topk 1")
        sinks_of(cache, self.geometry)  # raises if the cache has sinks, which this backend does not support
        if not batch.num_rows:
            return
        a, lens = self.geometry.attention, self._buffer[sizing.LENS][: batch.padded_reqs]
        longest = self.geometry.max_pages_per_req * a.page_size
        common = {
            "bmm1_scale": self._scale, "bmm2_scale": 1.0, "window_left": a.window_left, "out": out, "kv_layout": "NHD",
            "multi_ctas_kv_counter_buffer": self._buffer[sizing.COUNTERS],
        }  # fmt: skip
        front = (q.contiguous(), (cache.k, cache.v), self._buffer[sizing.WORKSPACE], self._table(batch), lens)
        if not batch.uniform:
            sums = self._buffer[sizing.KV_INDPTR][: batch.padded_reqs + 1]
            self._context(
                *front, max_q_len=max(batch.q_lens), max_kv_len=longest, batch_size=batch.padded_reqs,
                cum_seq_lens_q=batch.q_indptr, cum_seq_lens_kv=sums, **common,
            )  # fmt: skip
            return
        self._decode(*front, max_seq_len=longest, backend="trtllm-gen", q_len_per_req=batch.q_lens[0], **common)
