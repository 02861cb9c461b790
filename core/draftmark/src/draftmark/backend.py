"""Interfaces of an attention backend: four methods, called in the same order in eager mode, capture and replay."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from .batch import ForwardBatch
from .cache import KVCache


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention of one geometry on one device, bound to the buffers of an arena.

    In every forward the engine calls `plan`, then `write_metadata`, then `write_kv` and `attend` for each layer.
    In a layer with chosen keys the engine fills `ForwardBatch.chosen` before each `attend`, which reads the lists.
    With `Form.ENGINE_STORES` it never calls `write_kv`. In any mode it may leave out `attend`: the forward then only
    stores rows, such as DFlash's context of target features. A plugin that claims `BackendInfo.latent` or
    `BackendInfo.lse` implements the wider arguments of `BoundBackend`.
    With a graph, `plan` runs on the host before capture and before every replay. The other three methods are captured.
    A backend allocates nothing in these methods: its buffers are in the arena.

    Threads: an engine makes one call at a time in a process, and may make each call on another thread: open, these four
    methods, capture and replay. It sets the device and stream of that thread. A backend keeps nothing in thread-local
    storage or context variables, and needs no main thread. A call leaves the process as it was: settings, random
    generators, variables and handlers.
    """

    def plan(self, batch: ForwardBatch) -> None:
        """Make the host decisions for a batch, outside the graph, before each eager run, capture and replay.

        May read `batch.host`, `q_lens` and `tail_lens`; must not read the device. Host lengths are upper bounds. A
        bound may exceed the width of the page table, so the backend clamps it.

        At capture the batch has at least one live request. Its host lengths are `Unknown` unless the backend requires
        exact ones. The graph keeps every host decision that `plan` makes at capture, so it must be valid for every
        later replay. A decision made before a replay reaches the graph only through arena buffers.

        Args:
            batch: the forward to prepare. Read-only.
        """

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the arena's metadata buffers for this batch, with device operations only. Capturable.

        Args:
            batch: the forward that `plan` prepared. Read-only; its tensors are on the device.
        """

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Write keys and values of the query rows to their KV slots. Capturable.

        Args:
            k, v: ``[num_rows, num_kv_heads, head_dim]`` and ``[…, value_width]`` in q_dtype, with RoPE applied to k.
                Read-only. Elements of a head are contiguous; the row pitch may be larger, as in views of a fused QKV
                projection.
            cache: KV pages of one layer; written in place.
            batch: the current forward. Read-only.
        """

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention of each query row over its prefix and its visible tail slots. Capturable.

        For a layer that shares another layer's KV, the engine calls `attend` without `write_kv`.

        Args:
            q: ``[num_rows, num_qo_heads, head_dim]`` in q_dtype, with RoPE applied, rows grouped by request. Read-only,
                strided like k and v.
            cache: KV pages of one layer; read-only. `sinks_of` returns the layer's sinks or None.
            batch: the current forward. Read-only.
            out: output ``[num_rows, num_qo_heads, value_width]`` in q_dtype, contiguous. Every row is written; padding
                rows get finite values.
        """


class BoundBackend(AttentionBackend, Protocol):
    """Methods that an engine calls on the result of `LoadedBackend.bind`, with their optional arguments.

    An old plugin implements the narrower arguments of `AttentionBackend`. An engine passes None for v only if the
    geometry is latent, and lse only if `BackendInfo.lse` is True.
    """

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Write keys and values of the query rows to their KV slots. Capturable.

        Args:
            k: ``[num_rows, num_kv_heads, head_dim]`` as in `AttentionBackend.write_kv`; in a latent layer
                ``[num_rows, 1, head_dim]``, whole rows.
            v: ``[num_rows, num_kv_heads, value_width]``; None for a latent layer.
            cache, batch: as in `AttentionBackend.write_kv`.
        """

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Compute attention of each query row over its prefix and its visible tail slots. Capturable.

        Args:
            q, cache, batch, out: as in `AttentionBackend.attend`. In a latent layer q is absorbed: head_dim is the
                width of a row.
            lse: output, float32 ``[num_rows, num_qo_heads]``, contiguous: natural log-sum-exp of each row's scaled and
                capped logits, over keys only, without the sink. -inf for a row without keys. Every row is written;
                padding rows get -inf or finite values. None when the engine does not need it.
        """
