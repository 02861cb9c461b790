"""Attention backend for latent rows over FlashInfer's MLA kernels: plan, metadata, KV store and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from draftmark import BatchError, Geometry, Mode
from draftmark.runtime import Arena, Block, ForwardBatch, KVCache, Tree, record_call, sinks_of

from . import latent_launch as launch
from . import latent_plan as plans
from .latent_vendor import LatentRequest, LatentVendor
from .planning import check_batch
from .support import INT32_MAX

ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that FlashInfer loads at once. Strides and offsets are multiples of it."""


@dataclass(frozen=True)
class Plan:
    """Holds what FlashInfer's `plan` returned for one forward. The integers depend on shapes only.

    Attributes:
        offsets: offsets of the plan's arrays in the workspaces; None if the batch has no rows.
        causal: true if the pass is causal.
        tail: true if a second pass over the tail follows.
    """

    offsets: Sequence[int] | None
    causal: bool
    tail: bool


class LatentBackend:
    """FlashInfer backend for latent rows, with one code path for eager mode, capture and replay.

    Chains run one causal pass, decode and draft blocks one pass without a mask. Draft trees run a pass over the prefix
    and then `latent_kernels.attend_tail` over the tail. The kernels read the batch's page table in place.

    One pass rounds to 16 bit up to three times: the weights, partial outputs if FlashInfer splits the keys, and the
    output. A tree's output over the prefix is rounded once more, since FlashInfer's MLA kernels write 16 bit only. Its
    largest error is therefore 4 unit roundoffs of Σ p|v|, which `contract.roundoffs` declares.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        buffers = {name: arena[name] for name in arena}
        self._ints, self._floats = buffers[plans.INTS], buffers[plans.FLOATS]
        self._slots, self._scratch = buffers[plans.SLOTS], buffers[plans.SCRATCH]
        self._lse = buffers.get(plans.LSE)
        self._plans: dict[tuple[Mode, int, int], Plan] = {}
        self._vendor = LatentVendor(geometry.attention, geometry.device.arch) if self._ints.is_cuda else None

    def plan(self, batch: ForwardBatch) -> None:
        """Plan the pass over pages from the host's exact lengths, and enqueue one copy to the device."""
        check_batch(batch, self.geometry)
        pitch = batch.page_table.stride(0)
        if pitch * batch.padded_reqs * self.geometry.attention.page_size > INT32_MAX:
            raise BatchError(
                f"page_table has {batch.padded_reqs} rows of pitch {pitch}, but FlashInfer counts its tokens with "
                f"int32, up to {INT32_MAX}; use a table of max_pages_per_req columns"
            )
        # A tree of one branch or of one row runs as a chain: each row sees every slot up to its own.
        tail = isinstance(batch.tail, Tree) and plans.may_run_two_passes(self.geometry, batch.mode)
        unmasked, longest = tail or isinstance(batch.tail, Block), max(batch.q_lens)
        heads, q_len = self.geometry.attention.num_qo_heads, batch.q_lens[0] if batch.uniform else None
        piece = None if unmasked else plans.rows_of_a_piece(heads, q_len)
        causal = not unmasked and min(piece or longest, longest) > 1
        offsets = None
        if self._vendor is not None and batch.num_rows:
            request = _request(batch, pitch, piece, causal=causal, with_tail=not tail)
            offsets = self._vendor.plan(request, self._floats, self._ints_of(batch), self._scratch)
        self._plans[batch.mode, batch.padded_reqs, batch.step] = Plan(offsets, causal, tail)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the KV slots of the rows, in one launch."""
        slots, page_size = self._slots, self.geometry.attention.page_size
        record_call(launch.write_slots, _forward(batch), page_size, batch.prefix_lens, batch.q_indptr,
                    batch.page_table, slots, mutates=(slots,))  # fmt: skip

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Store the latent rows of the batch at their slots, in one launch. v is None."""
        values, rest = cache.parts
        slots = self._slots[: batch.num_rows]
        record_call(launch.write_latent_rows, k, values, rest, slots, mutates=(values, rest))

    def attend(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Compute attention: one pass, or a pass over the prefix and one over the tail that continues it."""
        vendor, plan = self._vendor, self._plans[batch.mode, batch.padded_reqs, batch.step]
        if vendor is None:
            raise BatchError("FlashInfer has no kernels for the CPU; open the backend on a CUDA device")
        sinks_of(cache, self.geometry)  # raises if the cache has sinks, which this backend does not support
        _check_aligned("q", q)
        for part in cache.parts:
            _check_aligned("cache", part)
        if plan.offsets is None:
            return
        if plan.tail and lse is None:
            assert self._lse is not None, "a mode that may run two passes has the buffer"
            lse = self._lse[: batch.num_rows]
        vendor.run(plan.offsets, self._floats, self._ints_of(batch), q, cache, batch.page_table, out, lse, plan.causal)
        if plan.tail:
            assert lse is not None
            assert isinstance(batch.tail, Tree), "only trees run two passes"
            record_call(
                launch.attend_tail, _forward(batch), self.geometry.attention, q, cache.parts, out, lse, batch.tail.mask,
                batch.prefix_lens, batch.q_indptr, batch.page_table, mutates=(out, lse),
            )  # fmt: skip

    def _ints_of(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the part of the integer workspace that holds the forward's plan."""
        first = plans.plan_offset(self.geometry, batch.mode, batch.step)
        return self._ints[first : first + plans.int_bytes(self.geometry.device.num_sms)]


def _request(batch: ForwardBatch, pitch: int, piece: int | None, *, causal: bool, with_tail: bool) -> LatentRequest:
    """Return the plan's arguments. Requests without rows are left out, because they would lower the mean row count.

    Args:
        piece: rows of a piece, which counts as a request with the keys up to its last row; None for whole requests.
    """
    known = batch.host.upper_bound()
    lens = [*known, *(0 for _ in range(batch.padded_reqs - len(known)))]
    q_lens, keys, tables = [], [], []
    for r, rows in enumerate(batch.q_lens):
        if not rows:
            continue
        pieces = plans.cut(rows, piece)
        before = lens[r] + batch.tail_lens[r] - rows
        q_lens += pieces
        keys += [before + last for last in accumulate(pieces)] if with_tail else [lens[r]]
        tables += [r * pitch] * len(pieces)
    tables.append(batch.padded_reqs * pitch)
    rows_before = list(accumulate(q_lens, initial=0))
    qo_indptr, kv_indptr, kv_lens = (torch.tensor(one, dtype=torch.int32) for one in (rows_before, tables, keys))
    return LatentRequest(qo_indptr, kv_indptr, kv_lens, causal)


def _forward(batch: ForwardBatch) -> launch.Forward:
    tail_len = batch.tail_lens[0] if batch.uniform else 0
    return launch.Forward(max(batch.q_lens), tail_len, not batch.uniform)


def _check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise unless FlashInfer can load the tensor's elements 16 bytes at a time."""
    odd = [one for one in tensor.stride()[:-1] if one % ALIGNED]
    if odd or tensor.data_ptr() % (2 * ALIGNED) or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
        raise BatchError(
            f"{name} has strides {list(tensor.stride())}, but FlashInfer loads 16 bytes at once: strides are multiples "
            f"of {ALIGNED} elements and the last one is 1; copy the tensor"
        )
