"""Writes metadata on the device by plain torch: slots, block tables, and for draft trees the tail's slots and mask.

It uses 32-bit integers and neither shifts nor searches. CANN would run those, and 64-bit division, on the AICPU of an
A2 or A3, and this code is captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import Arena, ForwardBatch, Tree

from . import sizing
from .lengths import HostLists
from .tree_ops import WORD, bit_weights, slots_at


def is_tree(batch: ForwardBatch) -> bool:
    """Return true if a forward has draft trees, so that it needs two passes. A tail of one row is always a chain."""
    return isinstance(batch.tail, Tree) and batch.q_lens[0] > 1


@dataclass(frozen=True)
class TreeMarks:
    """Holds what the trees of one batch of R requests with q rows and T tail slots each let their rows see.

    Attributes:
        slots: int64 ``[R·T]``, KV slot of each tail slot.
        mask: int8 ``[R, 1, q, T]``, 1 for a slot that a row does not see.
        has_prefix: float32 ``[R, 1, 1, 1]``, 1 for a request with a prefix, else 0.
    """

    slots: torch.Tensor
    mask: torch.Tensor
    has_prefix: torch.Tensor


@dataclass(frozen=True)
class TreeViews:
    """Holds views of the tree buffers for one batch of R requests with q rows and T tail slots each.

    Attributes:
        slots, mask, has_prefix: as in `TreeMarks`.
        k, v: ``[R·T, kv_heads, head_dim]``, the tail's keys and values, gathered.
        prefix_out, tail_out: ``[R·q, heads, head_dim]``, outputs of the two passes.
        prefix_lse: float32 ``[R·q, heads, 1]``; tail_lse: float32 ``[R, heads, q, 1]``.
        weight: float32 ``[R, q, heads, 1]``, weight of the prefix in the merge.
        merged: float32 ``[2, R, q, heads, head_dim]``, both outputs during the merge.
    """

    slots: torch.Tensor
    mask: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    has_prefix: torch.Tensor
    prefix_out: torch.Tensor
    tail_out: torch.Tensor
    prefix_lse: torch.Tensor
    tail_lse: torch.Tensor
    weight: torch.Tensor
    merged: torch.Tensor


class Metadata:
    """Holds views of the arena's metadata buffers, and writes them."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self._geometry = geometry
        self._arena = {name: arena[name] for name in arena}
        self.triangle = arena[sizing.TRIANGLE]
        side = torch.arange(sizing.TRIANGLE_SIDE, device=self.triangle.device)
        self.triangle.copy_(side[None, :] > side[:, None])
        if sizing.tree_modes(geometry):
            bits, word = self._arena[sizing.BITS], torch.arange(len(arena[sizing.BITS]), dtype=torch.int32)
            bits.copy_(bit_weights(len(bits), "cpu"))
            self._arena[sizing.WORD_OF].copy_(word // WORD)

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the KV slot that each row writes, int64 ``[num_rows]``."""
        return self._arena[sizing.SLOTS][: batch.num_rows]

    def slots32(self, batch: ForwardBatch) -> torch.Tensor:
        """Return `slots` as int32 ``[num_rows]`` for the operator. `rules` checks that the pool's slots fit."""
        return self._arena[sizing.SLOTS32][: batch.num_rows]

    def tables(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the block tables, int32 ``[R, max_pages_per_req]``, contiguous, at an address that never changes."""
        return self._arena[sizing.TABLES][: batch.padded_reqs]

    def piece_tables(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the block tables of an EXTEND batch's pieces of latent rows, int32 ``[pieces, max_pages_per_req]``."""
        return self._arena[sizing.PIECE_TABLES][: len(HostLists.of(batch).pieces)]

    def write(self, batch: ForwardBatch) -> None:
        """Write every metadata buffer that a forward reads. It can be captured and reads nothing on the host."""
        if batch.padded_reqs > self._geometry.max_reqs:
            raise BatchError(
                f"the batch has {batch.padded_reqs} requests, but the block tables hold {self._geometry.max_reqs}; "
                "raise max_num_reqs, or prefill fewer requests at a time"
            )
        self.tables(batch).copy_(batch.page_table)
        if not batch.uniform:
            if sizing.PIECE_TABLES in self._arena:
                request = torch.tensor(HostLists.of(batch).pieces, dtype=torch.int32).to(batch.device)
                self.piece_tables(batch).copy_(self.tables(batch).index_select(0, request))
            self._write_ragged_slots(batch)
            self.slots32(batch).copy_(self.slots(batch))
            return
        q_len, tail_len = batch.q_lens[0], batch.tail_lens[0]
        tail = torch.arange(tail_len, dtype=torch.int32, device=batch.device)
        slots = slots_at(batch.page_table, batch.prefix_lens[:, None] + tail, self._geometry.attention.page_size)
        self.slots(batch).view(batch.padded_reqs, q_len).copy_(slots[:, tail_len - q_len :])
        self.slots32(batch).copy_(self.slots(batch))
        if is_tree(batch):
            self._write_tree(batch, slots)

    def _write_ragged_slots(self, batch: ForwardBatch) -> None:
        """Write the slots of a ragged batch. The count of requests that end at or before a row is the row's request."""
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = (batch.q_indptr[None, 1:] <= rows[:, None]).sum(1)
        positions = batch.prefix_lens[request] + rows - batch.q_indptr[request]
        page_size = self._geometry.attention.page_size
        page = batch.page_table[request, (positions // page_size).long()].long()
        self.slots(batch).copy_(page * page_size + positions % page_size)

    def _write_tree(self, batch: ForwardBatch, slots: torch.Tensor) -> None:
        views, tail = self.marks(batch), batch.tail_lens[0]
        assert isinstance(batch.tail, Tree)
        views.slots.copy_(slots.view(-1))
        words = batch.tail.mask.index_select(1, self._arena[sizing.WORD_OF][:tail])
        blocked = words.bitwise_and(self._arena[sizing.BITS][:tail]) == 0
        views.mask.view(batch.num_rows, -1).copy_(blocked)
        views.has_prefix.view(-1).copy_(batch.prefix_lens > 0)

    def marks(self, batch: ForwardBatch) -> TreeMarks:
        """Return the buffers that say which tail slots a row sees, sliced to a batch."""
        arena, reqs, q, t = self._arena, batch.padded_reqs, batch.q_lens[0], batch.tail_lens[0]
        return TreeMarks(
            slots=arena[sizing.TAIL_SLOTS][: reqs * t],
            mask=arena[sizing.TAIL_MASK][: reqs * q * t].view(reqs, 1, q, t),
            has_prefix=arena[sizing.HAS_PREFIX][:reqs].view(reqs, 1, 1, 1),
        )

    def tree(self, batch: ForwardBatch) -> TreeViews:
        """Return the tree buffers of a layer with K and V, sliced to a batch."""
        a, arena = self._geometry.attention, self._arena
        marks, reqs, q, t = self.marks(batch), batch.padded_reqs, batch.q_lens[0], batch.tail_lens[0]
        rows, slots, heads = reqs * q, reqs * t, a.num_qo_heads
        parts, lses, merged = (_pair(arena[name], rows) for name in (sizing.PARTS, sizing.LSES, sizing.MERGE))
        kv = _pair(arena[sizing.TAIL_KV], slots)
        return TreeViews(
            slots=marks.slots,
            mask=marks.mask,
            k=kv[0],
            v=kv[1],
            has_prefix=marks.has_prefix,
            prefix_out=parts[0],
            tail_out=parts[1],
            prefix_lse=lses[0],
            tail_lse=lses[1].view(reqs, heads, q, 1),
            weight=arena[sizing.WEIGHT][:rows].view(reqs, q, heads, 1),
            merged=merged.view(2, reqs, q, heads, a.head_dim),
        )


def _pair(buffer: torch.Tensor, n: int) -> torch.Tensor:
    """Return the first ``2 · n`` elements of ``[2, most, …]`` as ``[2, n, …]``, so that a batch is contiguous."""
    return buffer.flatten(0, 1)[: 2 * n].view(2, n, *buffer.shape[2:])
