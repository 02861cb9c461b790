"""Prefill (EXTEND) of prompts and chunks: metadata and attention, without a host plan or host lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import sizing
from .heuristics import common, interpreted, select, sm90, split_kv
from .launch import attention, tma
from .launch.layouts import Layout, check_dtypes, layer_facts
from .launch.metadata import write_metadata_prefill
from .launch.operands import AttentionParams, Operands, PartialResults, SplitBuffers
from .launch.prepared import PreparedKernel
from .launch.relaunch import RelaunchCache

TMA_ALIGNMENT = 16
"""Alignment in bytes that TMA requires of addresses and strides."""
PER_CALL = Operands._fields[:-2]
"""Kernel parameters that change from layer to layer or step to step: the operands without a tree."""
DESCRIPTOR_ALIASES = {"k_extra": "k_source", "v_extra": "v_source"}
"""Second descriptor parameters, each mapped to the parameter of the same tensor (`tma.make_descriptors`)."""
KvOperands = tuple[torch.Tensor | None, ...]
"""(k, v, k_scale, v_scale, sinks): K and V as in `LayerFacts`, their scales, and attention sinks."""


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """Holds the kernel configuration and the split buffers for EXTEND batches.

    Plans compare by identity, because a plan is part of the key of `RelaunchCache`.

    Attributes:
        config: tile shape, stages and warp groups (`heuristics.common.KernelConfig`).
        split: splits and buffers for row tiles that can be split along the keys; None if they are never split.
    """

    config: common.KernelConfig
    split: SplitBuffers | None


class Prefill:
    """Runs ragged causal attention (EXTEND) for one geometry, over buffers of the caller.

    It serves every geometry without an entry in `support.reasons_against`. CPU tensors use Triton's interpreter.

    Args:
        slots: int64 ``[max rows]``, owned by the caller. `write_metadata` writes the KV slot of each row into it.
        row_tiles: int32 ``[n, 2]``, owned by the caller: a header, then request and index of each row tile. n must be
            at least `common.SCHEDULE_HEADER_ROWS` + max_extend_tokens · group // `common.MIN_BLOCK_M` + max_reqs.
            Hopper kernels count taken tiles in the header and reset the counter, so only one stream at a time can use
            the buffer.
        buffers: by name, the buffers of `sizing.split_buffers`, owned by the caller. None disables KV splits, as
            `Limits.batch_invariant` does.
        page_size: page size of the batches' page tables, if it differs from that of the attended pages (`prefill_fp8`).
    """

    def __init__(
        self,
        geometry: Geometry,
        slots: torch.Tensor,
        row_tiles: torch.Tensor,
        buffers: Mapping[str, torch.Tensor] | None = None,
        page_size: int | None = None,
    ) -> None:
        self._geometry, self._slots, self._row_tiles = geometry, slots, row_tiles
        self._shape = AttentionParams.from_geometry(geometry, slots.is_cuda)
        self._paged_shape = self._shape if page_size is None else replace(self._shape, page_size=page_size)
        self._relaunch, self._layer_facts = RelaunchCache(PER_CALL, DESCRIPTOR_ALIASES), layer_facts(geometry)
        self._launch_metadata = PreparedKernel()
        self._room = row_tiles.shape[0] - common.SCHEDULE_HEADER_ROWS
        self._config = sizing.prefill_config(geometry)
        self._buffers = None if geometry.limits.batch_invariant else buffers
        self._tiles = self._unsplit_tiles()
        self._unsplit_plans = {tiles: self._make_plan(tiles.config, 1) for tiles in self._tiles}
        self._split_plans = self._make_split_plans()
        self._last: tuple[Callable[[], ForwardBatch | None], PrefillPlan] = (
            (lambda: None),
            self._unsplit_plans[self._tiles[0]],
        )
        self._warmed_up = set[Layout]()

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the KV slot of every row, the row tiles and their split schedule, in one launch.

        Raises:
            BatchError: the batch needs more row tiles than `row_tiles` holds.
        """
        plan = self._plan_of(batch)
        count = common.max_row_tiles(plan.config, self._shape.group, batch.num_rows, len(batch.q_lens))
        slots, tiles = self._slots, self._row_tiles
        if count > self._room:
            raise BatchError(
                f"EXTEND has {batch.num_rows} rows of {batch.padded_reqs} requests, which need up to {count} row "
                f"tiles, but {self._room} are allocated; raise max_num_reqs or max_extend_tokens"
            )
        split = plan.split
        work, num_splits, num_ctas = (
            (None, 1, 1) if split is None else (split.partials.work, split.num_splits, split.num_ctas)
        )
        args = (
            self._paged_shape, plan.config, batch.num_rows, batch.prefix_lens, batch.q_indptr, batch.page_table, slots,
            tiles, batch.slots, work, num_splits, num_ctas,
        )  # fmt: skip
        if slots.is_cuda:
            write_metadata_prefill(*args, self._launch_metadata)
            return
        record_call(write_metadata_prefill, *args, mutates=(slots, tiles) if work is None else (slots, tiles, work))

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Run attention for all rows in one launch, then a combine launch if row tiles are split.

        Args:
            q: ``[rows, query heads, head_dim]``, head_dim contiguous.
            out: ``[rows, query heads, value width]``, contiguous along the last dimension.
            lse: float32 ``[rows, query heads]``, output: natural log-sum-exp over keys; None if it is not needed.
        """
        layout, k, v, sinks = self._layer_facts(cache)
        kv = (k, v, cache.k_scale, cache.v_scale, sinks)
        self.attend_pages(kv, layout, batch.page_table, q, batch, out, lse)

    def attend_pages(
        self,
        kv: KvOperands,
        cache_layout: Layout,
        table: torch.Tensor,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Run attention over given K and V pages, which need not be those of a cache.

        Args:
            kv: K, V, scales and sinks; see `KvOperands`.
            cache_layout: shapes, strides and dtypes of `kv`, interned; equal layouts share recorded launches.
            table: page table of `kv`, int32 ``[R, pages]``.
            q, out, lse: as in `attend`.
        """
        rows, plan = batch.num_rows, self._plan_of(batch)
        tensors = per_call_tensors(kv, table, q, batch, out, lse)
        if not self._slots.is_cuda:
            check_contiguous(q, out)
            written = [out] if lse is None else [out, lse]
            if plan.split is not None:
                written += plan.split.partials[1:]
            record_call(
                self.launch, rows, plan.config, Operands(*tensors), self._row_tiles, plan.split, mutates=tuple(written)
            )
            return
        layout = (
            *(rows, batch.padded_reqs, plan, table.stride(0), cache_layout),
            *(q.stride(), out.stride(), q.dtype, out.dtype, None if lse is None else lse.stride()),
        )  # fmt: skip
        if self._split_plans and cache_layout not in self._warmed_up:
            self.warm_up(kv, cache_layout, table, q, batch, out)
        self._relaunch(layout, tensors, self._launch, rows, plan)

    def warm_up(
        self,
        kv: KvOperands,
        cache_layout: Layout,
        table: torch.Tensor,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Compile every kernel that later batches over pages of this layout can need, by launches without row tiles.

        Otherwise the first split batch would stall a server for seconds. Arguments are those of `attend_pages`.
        """
        if cache_layout in self._warmed_up or torch.cuda.is_current_stream_capturing():
            return
        self._warmed_up.add(cache_layout)
        tensors = per_call_tensors(kv, table, q, batch, out, None)
        max_splits = max(
            (split.num_splits for plan in self._split_plans.values() if (split := plan.split) is not None), default=1
        )
        empty_schedule = torch.zeros(
            max(2 * max_splits * 4, 2 * common.SCHEDULE_HEADER_ROWS), dtype=torch.int32, device=self._slots.device
        )
        for plan in self.plans():
            split = plan.split
            if split is not None:
                split = split._replace(partials=split.partials._replace(work=empty_schedule))
            self.launch(batch.num_rows, plan.config, Operands(*tensors), empty_schedule, split)

    def _plan_of(self, batch: ForwardBatch) -> PrefillPlan:
        """Return the plan of a batch; that of the last batch is kept, because every layer needs it."""
        last, plan = self._last
        if last() is not batch:
            plan = self._select_plan(batch)
            self._last = ref(batch), plan
        return plan

    def _select_plan(self, batch: ForwardBatch) -> PrefillPlan:
        """Return the plan of a batch: with kernels that can split row tiles if that is possibly faster, else without.

        With a splittable plan, the device schedule decides from the true lengths. Kernels that can split are 3 to 15 %
        slower on unsplit tiles and need a combine launch. So the host selects the unsplit plan if its length bounds
        show that splitting is slower.
        """
        check_dtypes(batch)
        rows, lens = batch.q_lens, sizing.known_prefix_lens(batch)
        unsplit = split_kv.fastest_tiles(self._tiles, rows, lens)
        split = unsplit.split(rows, lens) if self._split_plans else None
        if split is None or not split.splitting_pays(rows, lens):
            return self._unsplit_plans[unsplit]
        return self._split_plans[split]

    def _unsplit_tiles(self) -> list[split_kv.ExtendTiles]:
        """Return the tiles of batches without splits. With batch invariance there is only one configuration."""
        a, device = self._geometry.attention, self._geometry.device
        every = (self._config,) if self._buffers is None else sm90.prefill_configs(a, self._config)
        return [split_kv.ExtendTiles(a, device, one) for one in every]

    def _make_split_plans(self) -> dict[split_kv.ExtendTiles, PrefillPlan]:
        """Return the plans for batches with splittable row tiles; tiles of equal configuration have one plan."""
        every = () if self._buffers is None else (one for unsplit in self._tiles for one in unsplit.when_split())
        tiles = [one for one in every if one.num_splits > 1]
        num_splits = {one.config: one.num_splits for one in tiles}
        plans = {config: self._make_plan(config, count) for config, count in num_splits.items()}
        return {one: plans[one.config] for one in tiles}

    def plans(self) -> list[PrefillPlan]:
        """Return every plan that a batch can have: those without splits first."""
        return list(dict.fromkeys((*self._unsplit_plans.values(), *self._split_plans.values())))

    def _make_plan(self, config: common.KernelConfig, num_splits: int) -> PrefillPlan:
        if not self._slots.is_cuda:
            a, longest = self._geometry.attention, self._geometry.max_kv_len
            config, num_splits = interpreted.interpreted_prefill_config(a, config, longest, num_splits)
        buffers = self._buffers
        if buffers is None or num_splits == 1:
            return PrefillPlan(config, None)
        num_ctas = self._geometry.device.num_sms * config.ctas_per_sm
        partials = PartialResults(*(buffers[name] for name in sizing.SPLIT_BUFFERS))
        return PrefillPlan(config, SplitBuffers(num_splits, num_ctas, partials))

    def _launch(self, num_rows: int, plan: PrefillPlan, *tensors: Any) -> None:
        operands = Operands(*tensors)
        check_contiguous(operands.q, operands.out)
        self.launch(num_rows, plan.config, operands, self._row_tiles, plan.split)

    def launch(
        self,
        num_rows: int,
        config: common.KernelConfig,
        t: Operands,
        row_tiles: torch.Tensor,
        split: SplitBuffers | None,
    ) -> None:
        """Launch attention for `num_rows` rows, with a configuration adapted to the strides of K and V."""
        a, device, kv = self._geometry.attention, self._geometry.device, (t.k_source, t.v_source)
        config = select.adapt_to_cache(
            a, device, config, has_uniform_row_stride(*kv), has_tma_boxes(*kv), has_adjacent_heads(*kv)
        )
        attention.attend_prefill(self._shape, config, num_rows, t, row_tiles, split)


def per_call_tensors(
    kv: KvOperands,
    table: torch.Tensor,
    q: torch.Tensor,
    batch: ForwardBatch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Return the tensors named in PER_CALL, in that order, from the arguments of `Prefill.attend_pages`."""
    return (q, *kv, out, lse, batch.prefix_lens, batch.q_indptr, table)


def check_contiguous(q: torch.Tensor, out: torch.Tensor) -> None:
    """Raise BatchError unless the elements of a head are contiguous in q and out."""
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise BatchError("q and out must have the elements of a head contiguous; call contiguous() on them")


def has_tma_boxes(*caches: torch.Tensor, heads: int = 1) -> bool:
    """Check whether `kernels_sm90` can load K and V, with `heads` adjacent KV heads merged into one."""
    describable = all(one.is_cuda and tma.is_tma_describable(tma.merge_heads(one, heads)) for one in caches)
    return describable and tma.has_gluon()


def has_uniform_row_stride(*caches: torch.Tensor) -> bool:
    """Check whether tokens have one constant stride across all pages, in K and in V, so that one TMA box fits."""
    return all(_has_uniform_row_stride(one) for one in caches)


def has_adjacent_heads(*caches: torch.Tensor) -> bool:
    """Check whether the heads of a token are adjacent in memory, in K and in V."""
    return all(one.stride(2) == one.shape[3] for one in caches)


def _has_uniform_row_stride(tensor: torch.Tensor) -> bool:
    pages, tokens, heads, last = tensor.stride()
    size, dim, unit = tensor.shape[1], tensor.shape[3], tensor.element_size()
    aligned = tokens * unit % TMA_ALIGNMENT == 0 and tensor.data_ptr() % TMA_ALIGNMENT == 0
    return pages == size * tokens and heads == dim and last == 1 and aligned
