"""Prefill (EXTEND) of prompts and chunks, from the batch's own lengths and page table. No plan, no host lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import sizing
from .heuristics import common, interpreted, select, split_kv
from .launch import launches, tma
from .launch.layouts import IdentityCache, Layout, layer_facts
from .launch.operands import AttentionParams, SplitBuffers
from .launch.relaunch import RelaunchCache

TMA_ALIGNMENT = 16
"""Bytes that the copy engine wants of an address and of a pitch."""
PER_CALL = (
    *("q", "k_source", "v_source", "k_scale", "v_scale", "sinks", "out"),
    *("prefix_lens", "q_indptr", "page_table"),
)
"""The kernel's parameters that another layer or step brings, in the order of `Prefill._launch`."""
DESCRIPTOR_ALIASES = {"k_extra": "k_source", "v_extra": "v_source"}
"""Its further descriptors, which are of the same tensors (`tma.make_descriptors`)."""
KvOperands = tuple[torch.Tensor | None, ...]
"""What is attended to: K and V ``[pages, P, KV heads, head_dim]``, their scales, and the sinks that count."""


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """How batches are worked on. Each is itself, and no other: it is part of the key of launches.

    Attributes:
        config: see `heuristics`. split: how its row tiles are cut by their keys, if they may be.
    """

    config: common.KernelConfig
    split: SplitBuffers | None


class Prefill:
    """Ragged causal attention of one geometry, for any backend whose buffers hold slots and row tiles.

    Serves what `support.reasons_against` finds nothing against. On CPU tensors it runs in Triton's interpreter.

    Args:
        slots: int64 ``[max rows]``, the caller's; `write_metadata_decode_verify` writes the KV slot of each row.
        row_tiles: int32 ``[n, 2]``, the caller's; the agenda, then request and index of each row tile. n is at least
            `common.SCHEDULE_HEADER_ROWS` + max_extend_tokens · group // b + max_reqs for tiles of b packed rows, and b
            is never under `common.MIN_BLOCK_M`, so that with b = MIN_BLOCK_M it always suffices. On Hopper a forward
            counts there what was taken, and leaves it as it was: one stream at a time attends with them.
        buffers: the caller's, of `sizing.split_buffers`, by name. With them few row tiles are cut by their keys, and
            merged; without, never.
        page_size: of the batches' page tables, where the pages that are attended to are others (`prefill_fp8`).
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
        self._config, self._buffers = sizing.prefill_config(geometry), buffers
        self._unsplit_plan, self._split_plans = self._make_plan(self._config, 1), self._make_split_plans()
        self._plan_of = IdentityCache[ForwardBatch, PrefillPlan](self._select_plan)
        self._warmed_up = set[Layout]()

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row, the row tiles, and how they are cut, in one launch.

        Raises:
            BatchError: the batch needs more row tiles than there is room for.
        """
        plan = self._plan_of(batch)
        count = common.max_row_tiles(plan.config, self._shape.group, batch.num_rows, batch.padded_reqs)
        slots, tiles = self._slots[: batch.num_rows], self._row_tiles
        room = tiles.shape[0] - common.SCHEDULE_HEADER_ROWS
        if count > room:
            raise BatchError(
                f"EXTEND has {batch.num_rows} rows of {batch.padded_reqs} requests, up to {count} row tiles, but "
                f"{room} are allocated; raise max_num_reqs or max_extend_tokens"
            )
        schedule = () if plan.split is None else (plan.split.work, plan.split.num_splits, plan.split.num_ctas)
        record_call(
            launches.write_metadata_prefill, self._paged_shape, plan.config, batch.num_rows, batch.prefix_lens,
            batch.q_indptr, batch.page_table, slots, tiles, batch.slots, *schedule,
            mutates=(slots, tiles, *schedule[:1]),
        )  # fmt: skip

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows in one launch, and a merge where row tiles are cut.

        Args:
            q, out: ``[rows, query heads, head_dim]``, head_dim contiguous.
        """
        layout, sinks = self._layer_facts(cache)
        kv = (cache.k, cache.v, cache.k_scale, cache.v_scale, sinks)
        self.attend_pages(kv, layout, batch.page_table, q, batch, out)

    def attend_pages(
        self,
        kv: KvOperands,
        cache_layout: Layout,
        table: torch.Tensor,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """The same over pages that may be others than a cache's.

        Args:
            cache_layout: all that launches take from `kv` but addresses. table: of its pages.
        """
        rows, plan = batch.num_rows, self._plan_of(batch)
        tensors = per_call_tensors(kv, table, q, batch, out)
        if not self._slots.is_cuda:
            check_contiguous(q, out)
            partials = () if plan.split is None else (plan.split.partial_out, plan.split.partial_lse)
            record_call(
                self._launch, rows, plan.config, plan.split, *tensors, self._row_tiles, mutates=(out, *partials)
            )
            return
        layout = (
            *(rows, batch.padded_reqs, plan, table.stride(0), cache_layout),
            *(q.stride(), out.stride(), q.dtype, out.dtype),
        )  # fmt: skip
        if self._split_plans and cache_layout not in self._warmed_up:
            self.warm_up(kv, cache_layout, table, q, batch, out)
        self._relaunch(layout, tensors, self._launch_with_row_tiles, rows, plan)

    def warm_up(
        self,
        kv: KvOperands,
        cache_layout: Layout,
        table: torch.Tensor,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Launch all that batches over such pages may be launched with, for no row tile: what is compiled when a
        server first needs it holds up everybody for seconds. It takes what `attend_pages` does.
        """
        if cache_layout in self._warmed_up or torch.cuda.is_current_stream_capturing():
            return
        self._warmed_up.add(cache_layout)
        tensors = per_call_tensors(kv, table, q, batch, out)
        max_splits = max(
            (split.num_splits for plan in self._split_plans.values() if (split := plan.split) is not None), default=1
        )
        empty_schedule = torch.zeros(
            max(2 * max_splits * 4, 2 * common.SCHEDULE_HEADER_ROWS), dtype=torch.int32, device=self._slots.device
        )
        for plan in (self._unsplit_plan, *self._split_plans.values()):
            split = None if plan.split is None else plan.split._replace(work=empty_schedule)
            self._launch(batch.num_rows, plan.config, split, *tensors, empty_schedule)  # type: ignore[call-arg,arg-type]

    def _select_plan(self, batch: ForwardBatch) -> PrefillPlan:
        """The schedule, which knows the lengths, says if row tiles are cut; but where it is asked a merge is launched,
        and the kernel is slower by 3 to 15 % than that which never cuts. So the host says no where it knows better.
        """
        a, device = self._geometry.attention, self._geometry.device
        rows, lens = batch.q_lens, sizing.known_prefix_lens(batch)
        config = None if self._buffers is None else split_kv.split_config(a, device, self._config, rows, lens)
        if config is None:
            return self._unsplit_plan
        pays = split_kv.splitting_pays(a, device, config, rows, lens)
        return self._split_plans[config] if pays else self._unsplit_plan

    def _make_split_plans(self) -> dict[common.KernelConfig, PrefillPlan]:
        """By the tile, how batches are worked on whose row tiles may be cut."""
        a, device = self._geometry.attention, self._geometry.device
        tiles = () if self._buffers is None else split_kv.split_configs(a, self._config)
        num_splits = {config: split_kv.prefill_splits(a, device, config) for config in tiles}
        return {config: self._make_plan(config, count) for config, count in num_splits.items() if count > 1}

    def _make_plan(self, config: common.KernelConfig, num_splits: int) -> PrefillPlan:
        if not self._slots.is_cuda:
            a, longest = self._geometry.attention, self._geometry.max_kv_len
            config, num_splits = interpreted.interpreted_prefill_config(a, config, longest, num_splits)
        buffers = self._buffers
        if buffers is None or num_splits == 1:
            return PrefillPlan(config, None)
        num_ctas = self._geometry.device.num_sms * config.ctas_per_sm
        return PrefillPlan(
            config, SplitBuffers(num_splits, num_ctas, *(buffers[name] for name in sizing.SPLIT_BUFFERS))
        )

    def _launch_with_row_tiles(self, num_rows: int, plan: PrefillPlan, *tensors: torch.Tensor) -> None:
        check_contiguous(tensors[0], tensors[PER_CALL.index("out")])
        self._launch(num_rows, plan.config, plan.split, *tensors, self._row_tiles)  # type: ignore[call-arg]  # as PER_CALL

    def _launch(
        self,
        num_rows: int,
        config: common.KernelConfig,
        split: SplitBuffers | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        prefix_lens: torch.Tensor,
        q_indptr: torch.Tensor,
        page_table: torch.Tensor,
        row_tiles: torch.Tensor,
    ) -> None:
        a, device = self._geometry.attention, self._geometry.device
        config = select.adapt_to_cache(
            a, device, config, has_uniform_row_stride(k, v), has_tma_boxes(k, v), has_adjacent_heads(k, v)
        )
        launches.attend_prefill(
            self._shape, config, num_rows, q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table, row_tiles, out,
            None, sinks, split,
        )  # fmt: skip


def per_call_tensors(
    kv: KvOperands, table: torch.Tensor, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of PER_CALL, of what `Prefill.attend_pages` takes."""
    return (q, *kv, out, batch.prefix_lens, batch.q_indptr, table)


def check_contiguous(q: torch.Tensor, out: torch.Tensor) -> None:
    """Raise BatchError unless the kernels can read q and write out."""
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise BatchError("q and out must have head_dim contiguous; call contiguous() on them")


def has_tma_boxes(*caches: torch.Tensor, heads: int = 1) -> bool:
    """Whether `kernels_sm90` can read K and V, as many heads at a time, which lie beside each other."""
    describable = all(one.is_cuda and tma.is_tma_describable(tma.merge_heads(one, heads)) for one in caches)
    return describable and tma.has_gluon()


def has_uniform_row_stride(*caches: torch.Tensor) -> bool:
    """Whether K's tokens are rows of one pitch, and V's, as a copy box describes them: views of packed pages too."""
    return all(_has_uniform_row_stride(one) for one in caches)


def has_adjacent_heads(*caches: torch.Tensor) -> bool:
    """Whether a token's heads lie beside each other, in K and in V."""
    return all(one.stride(2) == one.shape[3] for one in caches)


def _has_uniform_row_stride(tensor: torch.Tensor) -> bool:
    pages, tokens, heads, last = tensor.stride()
    size, dim, unit = tensor.shape[1], tensor.shape[3], tensor.element_size()
    aligned = tokens * unit % TMA_ALIGNMENT == 0 and tensor.data_ptr() % TMA_ALIGNMENT == 0
    return pages == size * tokens and heads == dim and last == 1 and aligned
