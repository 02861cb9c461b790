"""Decode, draft and verify (every mode except EXTEND): metadata and attention, without a host plan or host lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Block, ForwardBatch, KVCache, Tree, record_call

from . import sizing
from .heuristics import common, interpreted, select, split_kv
from .launch import attention, tma
from .launch.layouts import IdentityCache, check_dtypes, layer_facts
from .launch.metadata import write_metadata_decode_verify
from .launch.operands import AttentionParams, BatchExtent, Operands, PartialResults
from .launch.relaunch import MAX_LAYOUTS, RelaunchCache, drop_oldest
from .prefill import (
    DESCRIPTOR_ALIASES,
    check_contiguous,
    has_adjacent_heads,
    has_tma_boxes,
    has_uniform_row_stride,
)

PER_STEP = ("prefix_lens", "page_table", "slot_mapping", "work", "q_indptr", "engine_slots")
"""Tensors of a metadata launch that change per step, in the order of `write_metadata_decode_verify`."""
UNRECORDED_STEPS = 8
"""Steps of a layout in which its metadata launch is not recorded yet. Most sizes of ragged batches have fewer steps."""


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Holds the kernel configuration and the number of KV splits of all batches of one size.

    Plans compare by identity, because a plan is part of the key of `RelaunchCache`.

    Attributes:
        extent: numbers of requests, rows and tail tokens (a request's new tokens after the prefix).
        config: tile shape, stages and warp groups (`heuristics.common.KernelConfig`).
        num_splits: number of splits of the batch's sequence of KV tiles (`kernels.split_kv`), or of its requests.
    """

    extent: BatchExtent
    config: common.KernelConfig
    num_splits: int


BatchFacts = tuple[tuple[DecodePlan, bool, int, int | None], torch.Tensor | None, torch.Tensor | None]
"""Facts of a batch: (plan, whether its tail is a block, page table stride, mask stride), then tree mask and depths."""


class DecodeVerify:
    """Run attention of every mode except EXTEND for one geometry, with uniform or ragged row counts.

    It serves every geometry without an entry in `support.reasons_against`. CPU tensors use Triton's interpreter.

    Args:
        slots: int64 ``[max rows]``, owned by the caller. `write_metadata` writes the KV slot of each row into it.
        buffers: by name, the buffers of `sizing.decode_verify_buffers`, owned by the caller.
    """

    def __init__(self, geometry: Geometry, slots: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> None:
        self._geometry, self._slots = geometry, slots
        self._partials = PartialResults(*(buffers[name] for name in sizing.SPLIT_BUFFERS))
        self._shape = AttentionParams.from_geometry(geometry, slots.is_cuda)
        self._plans: dict[tuple[int, ...], DecodePlan] = {}
        self._choices: dict[tuple[int, int], tuple[common.KernelConfig, int]] = {}
        self._relaunch, self._relaunch_metadata = (
            RelaunchCache(Operands._fields, DESCRIPTOR_ALIASES | {"q_rest": "q"}),
            RelaunchCache(PER_STEP, unrecorded_uses=UNRECORDED_STEPS),
        )
        self._facts = IdentityCache[ForwardBatch, BatchFacts](self._batch_facts)
        self._layer_facts = layer_facts(geometry)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the KV slot of every row and the split-KV schedule, in one launch."""
        slots, table, work = self._slots, batch.page_table, self._partials.work
        plan = self._facts(batch)[0][0]
        own = self._shape, plan.config, plan.extent, plan.num_splits
        tensors = batch.prefix_lens, table, slots, work, batch.q_indptr, batch.slots
        if slots.is_cuda:
            self._relaunch_metadata(
                (plan, table.stride(0), batch.slots is None), tensors, write_metadata_decode_verify, *own
            )
            return
        record_call(write_metadata_decode_verify, *own, *tensors, mutates=(slots, work))

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Run attention for all rows, then combine the splits; the tensors are those of `Prefill.attend`."""
        facts, mask, depth = self._facts(batch)
        cache_layout, k, v, sinks = self._layer_facts(cache)
        tensors = (
            q, k, v, cache.k_scale, cache.v_scale, sinks, out, lse, batch.prefix_lens, batch.q_indptr,
            batch.page_table, mask, depth,
        )  # fmt: skip
        if self._slots.is_cuda:
            layout = facts, cache_layout, q.stride(), out.stride(), q.dtype, out.dtype, lse is None
            self._relaunch(layout, tensors, self._launch, *facts[:2])
            return
        check_contiguous(q, out)
        record_call(
            self.launch, *facts[:2], Operands(*tensors), self._partials,
            mutates=(*self._partials[1:], out, *(() if lse is None else (lse,))),
        )  # fmt: skip

    def _batch_facts(self, batch: ForwardBatch) -> BatchFacts:
        check_dtypes(batch)
        tail = batch.tail
        mask, depth = (tail.mask, tail.depth) if isinstance(tail, Tree) else (None, None)
        pitches = batch.page_table.stride(0), None if mask is None else mask.stride(0)
        return (self._plan_of(batch), isinstance(tail, Block), *pitches), mask, depth

    def _launch(self, plan: DecodePlan, block: bool, *tensors: Any) -> None:
        operands = Operands(*tensors)
        check_contiguous(operands.q, operands.out)
        self.launch(plan, block, operands, self._partials)

    def launch(self, plan: DecodePlan, block: bool, t: Operands, partials: PartialResults) -> None:
        """Launch attention with a configuration adapted to the strides of K and V."""
        a, device, k, v = self._geometry.attention, self._geometry.device, t.k_source, t.v_source
        adjacent = has_adjacent_heads(k, v)
        tma_boxes = has_tma_boxes(k, v, heads=plan.config.kv_heads_per_tile if adjacent else 1)
        tma_boxes = tma_boxes and (not a.latent or attention.has_aligned_rows(t.q))
        fast_memory = tma_boxes and tma.has_fast_memory(k.device)
        config = select.adapt_to_cache(
            a, device, plan.config, has_uniform_row_stride(k, v), tma_boxes, adjacent, fast_memory,
            flat_q=not a.latent or tma.has_flat_rows(t.q),
        )  # fmt: skip
        attention.attend_decode_verify(self._shape, config, plan.extent, plan.num_splits, t, partials, block)

    def _plan_of(self, batch: ForwardBatch) -> DecodePlan:
        """Return the plan of the batch, computed once per batch size because every layer needs it."""
        ragged = batch.mode is Mode.RAGGED_VERIFY
        # A CUDA graph freezes the plan, so a ragged batch is planned for the largest q_len of any replay.
        q_len = self._geometry.extent(batch.mode).q_len if ragged else batch.q_lens[0]
        whole = self._geometry.limits.batch_invariant
        size = (batch.padded_reqs, q_len, q_len if ragged else batch.tail_lens[0], batch.num_rows, ragged, whole)
        plan = self._plans.get(size)
        if plan is None:
            drop_oldest(self._plans, MAX_LAYOUTS)
            extent = BatchExtent(*size)
            # Ragged batches have many numbers of rows, and few of requests, on which the choice depends.
            choice = extent.q_len, extent.num_reqs
            if choice not in self._choices:
                self._choices[choice] = self.choose_splits(extent)
            plan = self._plans[size] = DecodePlan(extent, *self._choices[choice])
        return plan

    def choose_splits(self, extent: BatchExtent) -> tuple[common.KernelConfig, int]:
        """Return the kernel configuration and the number of KV splits of a batch of this size."""
        a, device = self._geometry.attention, self._geometry.device
        if extent.whole_requests:
            # A split for each request, and a tile shape for the largest batch: neither depends on this batch.
            config = select.select_config(a, device, extent.q_len, num_reqs=self._geometry.max_reqs)
            if not self._slots.is_cuda:
                config, _ = interpreted.interpreted_config(a, config, extent.q_len, 1, self._geometry.max_kv_len)
            return config, extent.num_reqs
        config = select.select_config(a, device, extent.q_len, num_reqs=extent.num_reqs)
        splits = split_kv.choose_num_splits(a, device, config, extent.q_len, extent.num_reqs, self._geometry.max_kv_len)
        if not self._slots.is_cuda:
            return interpreted.interpreted_config(a, config, extent.q_len, splits, self._geometry.max_kv_len)
        return config, split_kv.even_splits(splits, extent.num_reqs)
