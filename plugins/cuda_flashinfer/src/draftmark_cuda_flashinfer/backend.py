"""Attention backend over FlashInfer: plan, metadata, KV store and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmark import BatchError, Geometry, Mode
from draftmark.runtime import Arena, Block, ForwardBatch, KVCache, Tree, fence, record_call, sinks_of

from . import launch, levels, sizing
from .launch import Forward
from .planning import Planner, check_batch
from .staging import Staging
from .support import INT32_MAX
from .vendor import Pages, Vendor

LN2 = math.log(2)
_PAGED = (sizing.SLOTS, sizing.INDPTR, sizing.PAGES, sizing.LAST_PAGE)
_MASKED = (sizing.TAIL_INDPTR, sizing.TAIL_SLOTS, sizing.TAIL_LAST_PAGE, sizing.MASK, sizing.MASK_INDPTR)


@dataclass(frozen=True)
class Plans:
    """Holds what FlashInfer's `plan` returned for one forward: offsets of the plans' arrays in the workspaces.

    In a captured mode these integers depend on shapes only, so a CUDA graph can keep them.

    Attributes:
        paged: plan of the pass over pages: the causal pass, or the prefix pass of a forward in two passes.
        masked: plan of the masked pass over single tokens; None in a forward of one pass.
    """

    paged: Sequence[int]
    masked: Sequence[int] | None = None


class FlashInferBackend:
    """FlashInfer backend with one code path for eager mode, capture and replay.

    `plan` passes the host's lengths to FlashInfer's planner. A graph reads the plan from the integer workspaces.
    On CPU tensors `plan` only prepares FlashInfer's arguments, `write_metadata` works, and `attend` raises.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._arena = {name: arena[name] for name in arena}
        ints = self._arena[sizing.INTS]
        floats = self._arena.get(sizing.FLOATS)
        # A geometry that has only the mode EXTEND needs no float workspace. FlashInfer still takes the device from this
        # argument, so it gets the integer workspace.
        self._floats = floats if floats is not None and floats.numel() else ints
        self._ints = _plan_views(geometry, ints)
        self._paged_staging = sizing.aligned(sizing.plan_bytes(geometry)[0])
        self._planner = Planner(geometry, self._arena[sizing.HOST_INDPTR])
        self._plans: dict[tuple[Mode, int, int], Plans] = {}
        self._vendor: Vendor | None = None
        if ints.is_cuda:
            masked = bool(levels.masked_modes(geometry))
            self._vendor = Vendor(geometry.attention, pdl=geometry.device.arch >= 90, masked=masked)
            self._staging = Staging(self._arena[sizing.STAGING], lambda: fence(ints.device))

    # -- planning on the host -----------------------------------------------------------------------------

    def plan(self, batch: ForwardBatch) -> None:
        """Plan one or two passes from the host's exact lengths, and enqueue one or two small copies to the device."""
        check_batch(batch, self.geometry)
        paged, masked = self._planner.requests(batch, causal=not isinstance(batch.tail, Block))
        if self._vendor is None:
            return
        with self._staging.slot() as pinned:
            ints, place = self._ints[batch.mode, batch.step], self._paged_staging
            plans = Plans(self._vendor.plan(paged, self._floats, ints, pinned[:place]))
            if masked is not None:
                tail_ints = self._arena[sizing.TAIL_INTS]
                plans = Plans(plans.paged, self._vendor.plan(masked, self._floats, tail_ints, pinned[place:]))
        self._plans[batch.mode, batch.padded_reqs, batch.step] = plans

    # -- calls that CUDA graphs capture -------------------------------------------------------------------

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write page ids, the masked pass's tokens and mask bits, and the rows' KV slots, in one launch."""
        masked, a = levels.is_masked(self.geometry, batch.mode), self.geometry.attention
        tree = batch.tail if masked and isinstance(batch.tail, Tree) else None
        tail_len = batch.tail_lens[0] if batch.uniform else 0
        head_len = int(levels.head_len(self.geometry, tail_len)) if masked else 0
        forward = Forward(a.page_size, a.window_left, max(batch.q_lens), tail_len, head_len, not batch.uniform, masked)
        buffers = {name: self._arena[name] for name in (_PAGED + _MASKED if masked else _PAGED)}
        record_call(
            launch.write_indices, forward, batch.prefix_lens, batch.q_indptr, batch.page_table,
            None if tree is None else tree.mask, None if tree is None else tree.depth, buffers,
            mutates=tuple(buffers.values()),
        )  # fmt: skip

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store K and V of the batch's rows at their slots, in one launch."""
        slots_of_pool = cache.k.shape[0] * cache.k.shape[1]
        if slots_of_pool > INT32_MAX and levels.is_masked(self.geometry, batch.mode):
            raise BatchError(
                f"the KV pool has {slots_of_pool} slots, but FlashInfer indexes a tail's slots with int32; use a "
                f"pool of at most {INT32_MAX} slots"
            )
        slots = self._arena[sizing.SLOTS][: batch.num_rows]
        record_call(launch.write_rows, k, v, cache.k, cache.v, slots, mutates=(cache.k, cache.v))

    def attend(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Compute attention: one pass, causal except for a Block tail, or for trees two passes and their merge."""
        vendor = self._vendor
        if vendor is None:
            raise BatchError("FlashInfer has no kernels for the CPU; open the backend on a CUDA device")
        if q.stride(-1) != 1 or not out.is_contiguous():
            raise BatchError("q must have head_dim contiguous and out must be contiguous; call contiguous() on them")
        sinks_of(cache, self.geometry)  # raises if the cache has sinks, which this backend does not support
        plans = self._plans[batch.mode, batch.padded_reqs, batch.step]
        ints, window = self._ints[batch.mode, batch.step], self.geometry.attention.window_left
        pages = self._pages(batch.padded_reqs)
        if plans.masked is None:
            vendor.run(
                plans.paged, self._floats, ints, q, cache, batch.q_indptr, pages, out, lse,
                causal=not isinstance(batch.tail, Block), window_left=window,
            )  # fmt: skip
        else:
            rows = batch.num_rows
            own, tail_lse = self._arena[sizing.LSE][:rows], self._arena[sizing.TAIL_LSE][:rows]
            tail_out, total = self._arena[sizing.TAIL_OUT][:rows], own if lse is None else lse
            vendor.run(
                plans.paged, self._floats, ints, q, cache, batch.q_indptr, pages, out, total,
                causal=False, window_left=-1,
            )  # fmt: skip
            vendor.run(
                plans.masked, self._floats, self._arena[sizing.TAIL_INTS], q, _tokens(cache), batch.q_indptr,
                self._tail(batch.padded_reqs), tail_out, tail_lse, causal=False, window_left=-1,
            )  # fmt: skip
            vendor.merge(out, total, tail_out, tail_lse)
        if lse is not None:
            lse.mul_(LN2)  # FlashInfer's log-sum-exps are in base 2

    def _pages(self, count: int) -> Pages:
        arena = self._arena
        return Pages(arena[sizing.INDPTR][: count + 1], arena[sizing.PAGES], arena[sizing.LAST_PAGE][:count])

    def _tail(self, count: int) -> Pages:
        arena = self._arena
        return Pages(
            arena[sizing.TAIL_INDPTR][: count + 1], arena[sizing.TAIL_SLOTS], arena[sizing.TAIL_LAST_PAGE][:count],
            arena[sizing.MASK], arena[sizing.MASK_INDPTR][: count + 1],
        )  # fmt: skip


def _plan_views(geometry: Geometry, ints: torch.Tensor) -> dict[tuple[Mode, int], torch.Tensor]:
    """Return for each (mode, step) the part of the integer workspace that begins at its plan's offset."""
    steps = {mode: geometry.num_draft_steps if mode is Mode.DRAFT else 1 for mode in geometry.modes}
    return {
        (mode, step): ints[sizing.plan_offset(geometry, mode, step) :]
        for mode, count in steps.items() for step in range(count)
    }  # fmt: skip


def _tokens(cache: KVCache) -> KVCache:
    """Return a view of the cache with pages of one token, for the masked pass."""
    k, v = (pool.view(-1, 1, *pool.shape[2:]) for pool in (cache.k, cache.v))
    return KVCache(k, v)
