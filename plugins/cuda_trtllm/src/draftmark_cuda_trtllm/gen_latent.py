"""Backend over trtllm-gen's MLA decode kernels for latent rows, for sm_100 and sm_103: decode and chains of drafts.

It was never run on hardware. The call follows FlashInfer 0.7's signature. The kernels are downloaded binaries, so
they must be in FlashInfer's cubin directory before the backend opens on these GPUs.
"""

from __future__ import annotations

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import Arena, Causal, ForwardBatch, KVCache, record_call, sinks_of

from . import gen_sizing as sizing
from . import launch

QK_NOPE = 128
"""Argument `qk_nope_head_dim`, which trtllm-gen's decode does not read: queries are absorbed."""


class GenLatentBackend:
    """trtllm-gen backend for latent rows. Its kernels have no mask: row j of q rows sees the keys up to its own."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._buffer = {name: arena[name] for name in arena}
        self._decode = None
        if arena[sizing.LENS].is_cuda:
            from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

            self._decode = trtllm_batch_decode_with_kv_cache_mla

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: lengths are on the device."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write KV lengths (committed and new tokens) and slots, in one launch."""
        extent = self.geometry.extent(batch.mode, batch.step)
        lens = self._buffer[sizing.LENS][: batch.padded_reqs]
        slots = self._buffer[sizing.SLOTS][: batch.num_rows]
        record_call(
            launch.write_uniform, self.geometry.attention.page_size, (extent.q_len, extent.tail_len, extent.q_len),
            batch.prefix_lens, batch.page_table, None, lens, slots, None, None, 1, mutates=(lens, slots),
        )  # fmt: skip
        if batch.slots is not None:
            slots.copy_(batch.slots)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Store the latent rows of the batch at their slots, in one launch. v is None."""
        slots = self._buffer[sizing.SLOTS][: batch.num_rows]
        record_call(launch.write_latent_rows, k, cache.k, slots, mutates=(cache.k,))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention with one call of FlashInfer."""
        if self._decode is None:
            raise BatchError("attend runs on a CUDA device, but the arena is on the CPU; open the backend on cuda")
        if not isinstance(batch.tail, Causal):
            kind = type(batch.tail).__name__
            raise BatchError(f"the tail is a {kind}, but trtllm-gen ignores masks; pass Causal, or use topk 1")
        sinks_of(cache, self.geometry)  # raises if the cache has sinks, which this backend does not support
        a, count, rows = self.geometry.attention, batch.padded_reqs, batch.q_lens[0]
        self._decode(
            query=q.contiguous().view(count, rows, a.num_qo_heads, a.head_dim), kv_cache=cache.k.squeeze(2),
            workspace_buffer=self._buffer[sizing.WORKSPACE], qk_nope_head_dim=QK_NOPE, kv_lora_rank=a.value_width,
            qk_rope_head_dim=a.head_dim - a.value_width, block_tables=batch.page_table,
            seq_lens=self._buffer[sizing.LENS][:count], max_seq_len=self.geometry.max_pages_per_req * a.page_size,
            out=out.view(count, rows, a.num_qo_heads, a.value_width), bmm1_scale=a.softmax_scale, bmm2_scale=1.0,
            backend="trtllm-gen", multi_ctas_kv_counter_buffer=self._buffer[sizing.COUNTERS],
        )  # fmt: skip
