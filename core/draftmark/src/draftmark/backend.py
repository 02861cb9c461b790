"""The step-path protocol: four plain methods, in one order, eagerly, at capture and at replay."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from .batch import ForwardBatch
from .cache import KVCache


@runtime_checkable
class AttentionBackend(Protocol):
    """One geometry's attention on one device, bound to the buffers of its arena.

    For every forward the core calls `plan`, then `write_metadata`, then for every layer `write_kv` and `attend`.
    In a graph, `plan` runs on the host before capture and before every replay; the other three are captured.
    A backend allocates nothing on this path: its buffers are in the arena.
    """

    def plan(self, batch: ForwardBatch) -> None:
        """Decide on the host what the host must decide, outside the graph, before each run, capture and replay.

        May use `batch.host`, `q_lens` and `tail_lens`; must not read the device. Lengths are bounds: one may be loose
        enough to pass the page table's width, so clamp to it.

        At capture the batch has at least one live request and, unless the backend declares that it needs exact
        lengths, `Unknown` ones: whatever `plan` decides on the host then is frozen in the graph, so it must hold for
        every later replay. What `plan` decides before a replay reaches the graph through arena buffers only.
        """

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Fill the arena's buffers for this batch, on the device alone; capturable. The batch is read-only."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store the rows' keys and values at their KV slots.

        Args:
            k, v: ``[num_rows, num_kv_heads, head_dim]`` in q_dtype; RoPE has been applied to k. Read-only; head_dim is
                contiguous, and rows may lie further apart: they may be views of a fused projection.
            cache: one layer's pages; written in place.
        """

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute each row's attention over its prefix and its visible tail, into `out`.

        Args:
            q: ``[num_rows, num_qo_heads, head_dim]``, request-major, RoPE applied; read-only and strided like k and v.
            cache: one layer's pages; read-only. `sinks_of` says whether there are sinks to count.
            out: like q, but contiguous; every row is written, padded ones with finite values.
        """
