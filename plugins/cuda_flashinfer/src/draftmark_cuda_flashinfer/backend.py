"""The step path: four plain methods over the arena's buffers and the batch's own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from draftmark import Geometry, Mode
from draftmark.arena import Arena
from draftmark.batch import ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.errors import BatchError
from draftmark.graphs import record_call
from draftmark.lengths import Exact

from . import launch, levels, partition, sizing
from .launch import Forward
from .partition import Partition
from .staging import Staging
from .support import INT32_MAX
from .vendor import Pages, Request, Vendor

_PAGED = (sizing.SLOTS, sizing.INDPTR, sizing.PAGES, sizing.LAST_PAGE)
_MASKED = (sizing.TAIL_INDPTR, sizing.TAIL_SLOTS, sizing.TAIL_LAST_PAGE, sizing.MASK, sizing.MASK_INDPTR)


@dataclass(frozen=True)
class Plans:
    """Where FlashInfer put the plans of one kind of forward: of the paged level, and of the masked one.

    Integers that depend on shapes alone in a captured mode, so a graph may keep them.
    """

    paged: Sequence[int]
    masked: Sequence[int] | None = None


class FlashInferBackend:
    """One code path for eager, capture and replay.

    `plan` gives FlashInfer's planner the host's lengths; what it decides reaches a graph in the integer workspaces.
    On CPU tensors plans are counted and metadata is written, and no kernel of FlashInfer exists.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        a = geometry.attention
        self.geometry = geometry
        self.arena = arena
        self._arena = {name: arena[name] for name in arena}
        ints = self._arena[sizing.INTS]
        floats = self._arena.get(sizing.FLOATS)
        # A geometry of prefills only never cuts keys; FlashInfer still wants a tensor to take its device from.
        self._floats = floats if floats is not None and floats.numel() else ints
        self._float_room = 0 if floats is None else floats.numel()
        self._int_room = ints.numel()
        self._aligned = -(-ints.numel() // partition.ALIGNMENT) * partition.ALIGNMENT
        self._host_rows, self._host_pages = self._arena[sizing.HOST_INDPTR]
        counts = torch.arange(geometry.max_reqs + 1, dtype=torch.int32)
        self._ones = counts
        self._uniform_rows = {
            q: counts * q for q in {geometry.extent(m).q_len for m in geometry.modes if m is not Mode.EXTEND}
        }
        self._partitions: dict[tuple[Mode, int], tuple[Partition, Partition | None]] = {}
        self._plans: dict[tuple[Mode, int], Plans] = {}
        self._vendor: Vendor | None = None
        if ints.is_cuda:
            masked = bool(levels.masked_modes(geometry))
            self._vendor = Vendor(a, pdl=geometry.device.arch >= 90, masked=masked)
            self._staging = Staging(self._arena[sizing.STAGING], torch.cuda.Event)

    # -- plan ---------------------------------------------------------------------------------------------

    def plan(self, batch: ForwardBatch) -> None:
        """FlashInfer's plan of one or two passes, from the host's exact lengths; enqueues one or two small copies."""
        self._check(batch)
        asked, masked = self._paged_request(batch)
        if self._vendor is None:
            return
        ints = self._arena[sizing.INTS]
        with self._staging.slot() as pinned:
            plans = Plans(self._vendor.plan(asked, self._floats, ints, pinned[: self._aligned]))
            if masked is not None:
                tail = self._masked_request(batch, masked)
                tail_ints = self._arena[sizing.TAIL_INTS]
                plans = Plans(plans.paged, self._vendor.plan(tail, self._floats, tail_ints, pinned[self._aligned :]))
        self._plans[batch.mode, batch.padded_reqs] = plans

    def vendor_sizes(self, batch: ForwardBatch) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """FlashInfer's own count of (float, integer) workspace bytes: of the paged level, and of the masked one."""
        if self._vendor is None:
            raise BatchError("FlashInfer counts its workspaces on a CUDA device only; `usage()` counts them anywhere")
        asked, masked = self._paged_request(batch)
        found = self._vendor.workspace_size(asked, self._floats)
        if masked is None:
            return found, None
        return found, self._vendor.workspace_size(self._masked_request(batch, masked), self._floats)

    def _check(self, batch: ForwardBatch) -> None:
        if not isinstance(batch.host, Exact):
            raise BatchError(
                f"host is {type(batch.host).__name__}, but FlashInfer's plan needs Exact lengths: by a bound it cuts "
                "keys where the device does not; settle the lengths first, with overlap=False"
            )
        if batch.padded_reqs > self.geometry.max_reqs:
            raise BatchError(
                f"the batch has {batch.padded_reqs} requests, but max_reqs is {self.geometry.max_reqs}; "
                "raise max_num_reqs"
            )

    def _partition(self, batch: ForwardBatch, q_len: int) -> tuple[Partition, Partition | None]:
        """Of a uniform batch: it depends on counts alone, and is worked out once."""
        key = (batch.mode, batch.padded_reqs)
        if key not in self._partitions:
            paged, masked = partition.uniform(self.geometry, q_len, batch.padded_reqs), None
            if levels.is_masked(self.geometry, batch.mode):
                length = levels.masked_len(self.geometry, self._longest_tail(batch.mode))
                masked = partition.masked(self.geometry, q_len, batch.padded_reqs, length)
            self._partitions[key] = paged, masked
        return self._partitions[key]

    def _longest_tail(self, mode: Mode) -> int:
        """Of any step: a chunk that holds it makes one plan serve every step of a draft program."""
        extent = self.geometry.extent(mode, levels.last_step(self.geometry, mode))
        return int(extent.tail_len)

    def _paged_request(self, batch: ForwardBatch) -> tuple[Request, Partition | None]:
        """What the paged level's plan is asked for, and how the masked level, if there is one, is cut."""
        count, a = batch.padded_reqs, self.geometry.attention
        rows, ids = self._host_rows[: count + 1], self._host_pages[: count + 1]
        causal = not levels.is_masked(self.geometry, batch.mode)
        window = a.window_left if causal else -1
        uniform = batch.uniform
        if uniform is None:
            pages = sizing.host_pages(self.geometry, batch)
            cut = partition.extend(self.geometry, batch.q_lens, pages, self._float_room, self._int_room)
            rows.copy_(_offsets(batch.q_lens))
            ids.copy_(_offsets(pages))
            return Request(rows, ids, batch.num_rows, a.page_size, causal, window, cut), None
        cut, masked = self._partition(batch, uniform.q_len)
        if cut.graph:
            ids.copy_(_offsets(sizing.host_pages(self.geometry, batch)))
        else:
            ids = self._ones[: count + 1]  # a chunk holds any request, so no length matters
        rows = self._uniform_rows[uniform.q_len][: count + 1]
        return Request(rows, ids, batch.num_rows, a.page_size, causal, window, cut, uniform.q_len), masked

    def _masked_request(self, batch: ForwardBatch, cut: Partition) -> Request:
        """One token a request stands for any number: a chunk holds them all."""
        count = batch.padded_reqs
        rows, ones = self._uniform_rows[batch.q_lens[0]][: count + 1], self._ones[: count + 1]
        return Request(rows, ones, batch.num_rows, 1, False, -1, cut)

    # -- the captured part --------------------------------------------------------------------------------

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Page ids, tail tokens, mask bits and slots, in one launch."""
        masked, a = levels.is_masked(self.geometry, batch.mode), self.geometry.attention
        uniform, tree = batch.uniform, masked and isinstance(batch.tail, Tree)
        tail_len = 0 if uniform is None else uniform.tail_len
        head_len = int(levels.head_len(self.geometry, tail_len)) if masked else 0
        forward = Forward(a.page_size, a.window_left, max(batch.q_lens), tail_len, head_len, uniform is None, masked)
        buffers = {name: self._arena[name] for name in (_PAGED + _MASKED if masked else _PAGED)}
        record_call(
            launch.write_indices, forward, batch.prefix_lens, batch.q_indptr, batch.page_table,
            batch.tail.mask if tree else None, batch.tail.depth if tree else None, buffers,
            mutates=tuple(buffers.values()),
        )  # fmt: skip

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Scatter the rows to their slots, K and V in one launch."""
        slots_of_pool = cache.k.shape[0] * cache.k.shape[1]
        if slots_of_pool > INT32_MAX and levels.is_masked(self.geometry, batch.mode):
            raise BatchError(
                f"the KV pool has {slots_of_pool} slots, but FlashInfer names a tail's by int32; use a smaller pool"
            )
        slots = self._arena[sizing.SLOTS][: batch.num_rows]
        record_call(launch.write_rows, k, v, cache.k, cache.v, slots, mutates=(cache.k, cache.v))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """One causal pass; or the prefix unmasked, the tail masked, and their merge."""
        vendor = self._vendor
        if vendor is None:
            raise BatchError("FlashInfer has no kernels for the CPU; open the backend on a CUDA device")
        if q.stride(-1) != 1 or not out.is_contiguous():
            raise BatchError("q must have head_dim contiguous and out must be contiguous; call contiguous() on them")
        plans = self._plans[batch.mode, batch.padded_reqs]
        ints, window = self._arena[sizing.INTS], self.geometry.attention.window_left
        pages = self._pages(batch.padded_reqs)
        if plans.masked is None:
            vendor.run(
                plans.paged, self._floats, ints, q, cache, batch.q_indptr, pages, out, None,
                causal=True, window_left=window,
            )  # fmt: skip
            return
        rows = batch.num_rows
        lse, tail_lse = self._arena[sizing.LSE][:rows], self._arena[sizing.TAIL_LSE][:rows]
        tail_out = self._arena[sizing.TAIL_OUT][:rows]
        vendor.run(
            plans.paged, self._floats, ints, q, cache, batch.q_indptr, pages, out, lse, causal=False, window_left=-1
        )
        vendor.run(
            plans.masked, self._floats, self._arena[sizing.TAIL_INTS], q, _tokens(cache), batch.q_indptr,
            self._tail(batch.padded_reqs), tail_out, tail_lse, causal=False, window_left=-1,
        )  # fmt: skip
        vendor.merge(out, lse, tail_out, tail_lse)

    def _pages(self, count: int) -> Pages:
        arena = self._arena
        return Pages(arena[sizing.INDPTR][: count + 1], arena[sizing.PAGES], arena[sizing.LAST_PAGE][:count])

    def _tail(self, count: int) -> Pages:
        arena = self._arena
        return Pages(
            arena[sizing.TAIL_INDPTR][: count + 1], arena[sizing.TAIL_SLOTS], arena[sizing.TAIL_LAST_PAGE][:count],
            arena[sizing.MASK], arena[sizing.MASK_INDPTR][: count + 1],
        )  # fmt: skip


def _offsets(counts: Sequence[int]) -> torch.Tensor:
    """int32 ``[n + 1]`` on the host: where each of n begins."""
    return torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)


def _tokens(cache: KVCache) -> KVCache:
    """The cache with pages of one token."""
    k, v = (pool.view(-1, 1, *pool.shape[2:]) for pool in (cache.k, cache.v))
    return KVCache(k, v)
