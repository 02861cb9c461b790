"""Mutants S31 … S54, by outside authors who knew only the tutorial: plans, metadata, graphs and tree operations.

Each subclasses the tutorial's backend, called tugboat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from draftmark import BufferSpec, Geometry, Init, Memory, Mode, Role, Unit
from draftmark.graphs import RecordedGraph
from draftmark.runtime import (
    Arena,
    ForwardBatch,
    GraphState,
    KeyedGraphState,
    KVCache,
    KVPool,
    TorchTreeOps,
    Tree,
    Unknown,
    VerifyResult,
    slots_of,
    to_device,
)

from .mutant import ONLY, Mutant
from .tutorial import Backend
from .tutorial import Plugin as Tutorial

# -- base classes that several mutants share; each of them is correct --------------------------------------------


class Mapped(Backend):
    """The tutorial's backend, with `write_metadata` in three parts: request of each row, tail length, and slots."""

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        return torch.searchsorted(batch.q_indptr, rows, right=True) - 1

    def tail_of(self, batch: ForwardBatch) -> Any:
        return batch.q_indptr.diff() if batch.uniform is None else batch.uniform.tail_len

    def write_metadata(self, batch: ForwardBatch) -> None:
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request, page_size = self.request_of(batch).long(), self.shape.page_size
        end = (batch.prefix_lens + self.tail_of(batch))[request]
        position = (end - (batch.q_indptr[request + 1] - rows)).long()
        page = batch.page_table[request, position // page_size].long()
        self.slots[: batch.num_rows] = page * page_size + position % page_size


class Planned(Backend):
    """The tutorial's backend with a plan: it copies length bounds to the device, and attend ignores keys beyond."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.bounds = self.own_bounds(geometry, arena)

    def own_bounds(self, geometry: Geometry, arena: Arena) -> torch.Tensor:
        return arena["bounds"]

    def plan(self, batch: ForwardBatch) -> None:
        self.send(bounds_of(batch))

    def send(self, lens: tuple[int, ...]) -> None:
        self.bounds[: len(lens)].copy_(to_device(lens, self.bounds.device, torch.int32))

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        seen = super()._visible(batch, request, rows, prefix, tail_len)
        key = torch.arange(self.width, device=prefix.device)
        return seen & (key < self.bounds[request] + tail_len)


def bounds_of(batch: ForwardBatch) -> tuple[int, ...]:
    """Return the host's upper bound of every prefix, 0 for padded requests."""
    return (*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs))


def schedule(geometry: Geometry) -> list[BufferSpec]:
    """Declare the buffer of `Planned`. It starts with zeros and is not cleared between steps."""
    shape = (geometry.max_reqs,)
    return [BufferSpec("bounds", Role.SPLIT_SCHEDULE, shape, "int32", Unit.TOKENS, "max_reqs", init=Init.ZEROS)]


def schedule_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"bounds": 4 * batch.padded_reqs}


def plugin(
    backend: type[Backend] = Backend,
    more: Callable[[Geometry], list[BufferSpec]] | None = None,
    tree: type[TorchTreeOps] | None = None,
    graphs: type[KeyedGraphState] | None = None,
) -> type[Tutorial]:
    """Return the tutorial's plugin with another backend, more buffers, other tree operations or graph state."""

    class Plugin(Tutorial):
        def buffers(self, geometry: Geometry) -> list[BufferSpec]:
            return super().buffers(geometry) + (more(geometry) if more else [])

        def open_backend(self, geometry: Geometry, arena: Arena) -> Backend:
            return backend(geometry, arena)

        def tree_ops(self, geometry: Geometry, device: torch.device) -> TorchTreeOps | None:
            return tree(geometry) if tree else None

        def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
            return graphs() if graphs and device.type == "cpu" else super().graph_state(geometry, device)

    return Plugin


# -- plans --------------------------------------------------------------------------------------------------------


class PlanMemo(Planned):
    """Skips a plan when the sum and maximum of the lengths are unchanged, so swapped requests keep the old plan."""

    last: tuple[object, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        lens = bounds_of(batch)
        key = (batch.mode, batch.step, batch.padded_reqs, batch.num_reqs, sum(lens), max(lens, default=0))
        if key != self.last:
            self.last = key
            super().plan(batch)


RING = 8


class StagingRing(Planned):
    """Rotates through eight pinned buffers without a fence: correct until the device is nine plans late."""

    turn = 0

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.staging = arena["staging"]

    def send(self, lens: tuple[int, ...]) -> None:
        row = self.staging[self.turn % RING, : len(lens)]
        self.turn += 1
        row.copy_(torch.tensor(lens, dtype=torch.int32))
        self.bounds[: len(lens)].copy_(row, non_blocking=True)


def ring_buffers(geometry: Geometry) -> list[BufferSpec]:
    shape, formula = (RING, geometry.max_reqs), "8 × max_reqs"
    staging = BufferSpec("staging", Role.HOST_STAGING, shape, "int32", Unit.TOKENS, formula, Memory.PINNED)
    return [*schedule(geometry), staging]


def ring_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"bounds": 4 * batch.padded_reqs, "staging": 4 * RING * geometry.max_reqs}


SHARED: dict[torch.device, torch.Tensor] = {}


class SharedWorkspace(Planned):
    """Shares one workspace between all backends on a device, so the draft's plan overwrites the target's."""

    def own_bounds(self, geometry: Geometry, arena: Arena) -> torch.Tensor:
        device = arena["slots"].device
        if device not in SHARED or len(SHARED[device]) < geometry.max_reqs:
            SHARED[device] = torch.zeros(max(4096, geometry.max_reqs), dtype=torch.int32, device=device)
        return SHARED[device]


class WorstCaseOnce(Planned):
    """Sends the constant plan for Unknown host lengths only once, although a batch of Exact lengths overwrites it."""

    sent = -1

    def plan(self, batch: ForwardBatch) -> None:
        if not isinstance(batch.host, Unknown):
            super().plan(batch)
        elif self.sent < batch.padded_reqs:
            self.send((batch.host.bound,) * batch.padded_reqs)
            self.sent = batch.padded_reqs


class TailCell(Mapped):
    """`plan` stores the tail length in one cell, so all steps of a multi-step draft graph use the last step's value."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.cell = arena["tail_len"]

    def plan(self, batch: ForwardBatch) -> None:
        if batch.uniform is not None:
            self.cell.fill_(batch.uniform.tail_len)

    def tail_of(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.q_indptr.diff() if batch.uniform is None else self.cell


def cell_buffer(geometry: Geometry) -> list[BufferSpec]:
    return [BufferSpec("tail_len", Role.WORKSPACE, (1,), "int32", Unit.TOKENS, "1")]


class GrownWorkspace(Planned):
    """Reallocates a workspace outside the arena for larger eager batches, but captured graphs read the old one."""

    def own_bounds(self, geometry: Geometry, arena: Arena) -> torch.Tensor:
        self.retired: list[torch.Tensor] = []
        size = max(geometry.limits.capture_batch_sizes, default=geometry.max_reqs)
        return torch.zeros(size, dtype=torch.int32, device=arena["slots"].device)

    def plan(self, batch: ForwardBatch) -> None:
        if batch.padded_reqs > len(self.bounds):
            self.retired.append(self.bounds)  # captured graphs still read the old tensor
            self.bounds = torch.zeros(2 * batch.padded_reqs, dtype=torch.int32, device=self.bounds.device)
        super().plan(batch)


class InferenceScratch(Planned):
    """Allocates host scratch in the first plan. If that plan ran in inference mode, later plans cannot write it."""

    scratch: torch.Tensor | None = None

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.size = geometry.max_reqs

    def send(self, lens: tuple[int, ...]) -> None:
        if self.scratch is None:
            self.scratch = torch.zeros(self.size, dtype=torch.int32)
        self.scratch[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        self.bounds[: len(lens)].copy_(self.scratch[: len(lens)])


# -- metadata -----------------------------------------------------------------------------------------------------


class RowMapCache(Mapped):
    """Caches EXTEND's row-to-request map by rows, requests and longest chunk, so chunks 5 + 3 use the map of 3 + 5."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.maps: dict[tuple[int, ...], torch.Tensor] = {}

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        if batch.mode is not Mode.EXTEND:
            return super().request_of(batch)
        key = (batch.num_rows, batch.padded_reqs, max(batch.q_lens, default=0))
        if key not in self.maps:
            self.maps[key] = super().request_of(batch)
        return self.maps[key]


class RowMapByMarks(Mapped):
    """Maps rows to requests by a running sum of marks at first rows; an empty request shares its mark with the next."""

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        marks = torch.zeros(batch.num_rows + 1, dtype=torch.int64, device=batch.device)
        marks.index_fill_(0, batch.q_indptr[:-1].long(), 1)
        return marks[: batch.num_rows].cumsum(0) - 1


class WrittenOnce(Mapped):
    """Writes metadata once per plan, so a capture after a warm-up run contains no metadata kernels."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.written: set[tuple[Mode, int]] = set()

    def plan(self, batch: ForwardBatch) -> None:
        self.written.discard((batch.mode, batch.step))

    def write_metadata(self, batch: ForwardBatch) -> None:
        if (batch.mode, batch.step) not in self.written:
            self.written.add((batch.mode, batch.step))
            super().write_metadata(batch)


class IncrementalTable(Mapped):
    """Copies only new page-table columns while a row's first page is unchanged and its length did not shrink.

    A preempted request can return to its row with the same first page from the prefix cache and other pages after it.
    Another request with the same prompt has the same first page too.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.table, self.lens = arena["table"], arena["last_lens"]

    def write_metadata(self, batch: ForwardBatch) -> None:
        table, lens = self.table[: batch.padded_reqs], self.lens[: batch.padded_reqs]
        same = (table[:, 0] == batch.page_table[:, 0]) & (batch.prefix_lens >= lens)
        column = torch.arange(table.shape[1], device=batch.device)
        known = same[:, None] & (column < (lens // self.shape.page_size)[:, None])
        table.copy_(torch.where(known, table, batch.page_table))
        lens.copy_(batch.prefix_lens)
        super().write_metadata(batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, replace(batch, page_table=self.table[: batch.padded_reqs]), out)


def own_table(geometry: Geometry) -> list[BufferSpec]:
    shape, one, tokens = (geometry.max_reqs, geometry.max_pages_per_req), (geometry.max_reqs,), Unit.TOKENS
    formula = "max_reqs × max_pages_per_req"
    return [
        BufferSpec("table", Role.WORKSPACE, shape, "int32", Unit.PAGES, formula, init=Init.ZEROS),
        BufferSpec("last_lens", Role.WORKSPACE, one, "int32", tokens, "max_reqs", init=Init.ZEROS),
    ]


def table_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"table": 4 * batch.padded_reqs * geometry.max_pages_per_req, "last_lens": 4 * batch.padded_reqs}


class StaticViews(Backend):
    """Keeps the tensors of the first batch of each (mode, step, size), though engines may alternate two buffers."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.views: dict[tuple[Mode, int, int], ForwardBatch] = {}

    def _static(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.mode is Mode.EXTEND:
            return batch
        first = self.views.setdefault((batch.mode, batch.step, batch.padded_reqs), batch)
        return replace(batch, prefix_lens=first.prefix_lens, page_table=first.page_table)

    def write_metadata(self, batch: ForwardBatch) -> None:
        super().write_metadata(self._static(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, self._static(batch), out)


# -- attention ----------------------------------------------------------------------------------------------------

POSITIONS: dict[tuple[int, torch.device], torch.Tensor] = {}


class CapturedConstant(Backend):
    """Caches key positions by width in a module; if a capture creates them, they live in that graph's memory pool."""

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        at = (self.width, prefix.device)
        if at not in POSITIONS:
            POSITIONS[at] = torch.arange(self.width, device=prefix.device)
        seen = super()._visible(batch, request, rows, prefix, tail_len)
        return seen & (POSITIONS[at] < prefix + tail_len)


class FirstLayerByAddress(Backend):
    """Computes masks in layer 0 for all layers, and recognises layer 0 by the first KV cache address ever seen.

    Engines profile memory with a small KV pool and allocate the real one afterwards, so the address changes.
    """

    layer0: int | None = None

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.masks: dict[tuple[object, ...], torch.Tensor] = {}

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.layer0 = cache.k.data_ptr() if self.layer0 is None else self.layer0
        self.first = cache.k.data_ptr() == self.layer0
        super().attend(q, cache, batch, out)

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        key = (batch.mode, batch.step, request, rows.stop - rows.start)
        if self.first or key not in self.masks:
            self.masks[key] = super()._visible(batch, request, rows, prefix, tail_len)
        return self.masks[key]


class SubBatches(Backend):
    """Splits eager batches that are larger than any graph, but does not slice the tree's `depth` for each part."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.part = max(geometry.limits.capture_batch_sizes, default=geometry.max_reqs)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if batch.uniform is None or batch.padded_reqs <= self.part:
            super().attend(q, cache, batch, out)
            return
        n = batch.uniform.q_len
        for first in range(0, batch.padded_reqs, self.part):
            some = slice(first, min(first + self.part, batch.padded_reqs))
            rows, tail = slice(some.start * n, some.stop * n), batch.tail
            part = replace(
                batch,
                prefix_lens=batch.prefix_lens[some],
                page_table=batch.page_table[some],
                q_lens=batch.q_lens[some],
                tail_lens=batch.tail_lens[some],
                tail=Tree(tail.mask[rows], tail.depth) if isinstance(tail, Tree) else tail,
            )
            super().attend(q[rows], cache, part, out[rows])


class TopkOneIsChain(Backend):
    """Attends causally to draft tokens if topk is 1, although n-gram and suffix drafters make trees without topk."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.chain = geometry.draft.topk == 1

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        if self.chain and isinstance(batch.tail, Tree):
            depth = torch.arange(tail_len, device=prefix.device).expand(batch.padded_reqs, -1)
            causal = torch.arange(tail_len, device=prefix.device)
            words = pack(causal <= causal[tail_len - (rows.stop - rows.start) :, None], batch.tail.mask.shape[1])
            mask = batch.tail.mask.clone()
            mask[rows] = words
            batch = replace(batch, tail=Tree(mask, depth))
        return super()._visible(batch, request, rows, prefix, tail_len)


def pack(bits: torch.Tensor, words: int) -> torch.Tensor:
    """Pack bool ``[rows, T]`` into int32 ``[rows, words]``."""
    padded = torch.nn.functional.pad(bits, (0, words * 32 - bits.shape[1])).view(len(bits), words, 32)
    return (padded.long() << torch.arange(32, device=bits.device)).sum(-1).to(torch.int32)


class IdleRank(Backend):
    """Returns without writing `out` when a batch has no live request, although a later all-to-all reads `out`."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if batch.num_reqs:
            super().attend(q, cache, batch, out)


CHUNK = 128


class EmptySplit(Backend):
    """Splits the prefix into parts of 128 keys by the host's bound. A part without keys on the device gives NaN.

    Exact lengths give no empty part, and Unknown lengths (every capture) are not split. With overlap, the host's bound
    may pass a multiple of 128 that the device's length does not pass. That gives an empty part.
    """

    parts: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        split = not isinstance(batch.host, Unknown) and self.shape.window_left < 0
        self.parts = tuple(-(-n // CHUNK) if split else 0 for n in bounds_of(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, batch, out)
        first, key = 0, torch.arange(self.width, device=q.device)
        for request, (n, tail) in enumerate(zip(batch.q_lens, batch.tail_lens, strict=True)):
            rows, parts = slice(first, first + n), self.parts[request]
            first += n
            if n == 0 or parts < 2:
                continue
            prefix, table = batch.prefix_lens[request].long(), batch.page_table[request]
            live = (key < prefix + tail)[:, None, None]
            k, v = (torch.where(live, one[table].flatten(0, 1).float(), 0.0) for one in (cache.k, cache.v))
            k, v = (one.repeat_interleave(self.shape.group_size, dim=1) for one in (k, v))
            scores = torch.einsum("qhd,nhd->hqn", q[rows].float(), k) * self.scale
            seen, part = self._visible(batch, request, rows, prefix, tail), torch.where(key < prefix, key // CHUNK, -1)
            masked = [scores.masked_fill(~(seen & (part == i)), float("-inf")) for i in range(-1, parts)]
            outs = torch.stack([torch.einsum("hqn,nhd->qhd", one.softmax(-1), v) for one in masked])
            weight = torch.stack([one.logsumexp(-1).T for one in masked]).softmax(0)
            out[rows] = (weight[..., None] * outs).sum(0).to(out.dtype)


WIDTHS: dict[tuple[object, int], int] = {}


class WidthByContext(Backend):
    """Caches the KV width by (attention, max_context_len), although longer drafts or overlap need more width."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.width = WIDTHS.setdefault((geometry.attention, geometry.limits.max_context_len), self.width)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        table = batch.page_table[:, : self.width // self.shape.page_size]
        self.width = table.shape[1] * self.shape.page_size
        super().attend(q, cache, replace(batch, page_table=table), out)

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        kept, self.width = self.width, self.width + tail_len  # a tail may end beyond width; [:, :kept] drops those keys
        try:
            return super()._visible(batch, request, rows, prefix, tail_len)[:, :kept]
        finally:
            self.width = kept


# -- graph states -------------------------------------------------------------------------------------------------

OUTPUTS: dict[tuple[object, ...], torch.Tensor] = {}


class PooledRecording:
    """A captured graph that keeps its outputs in a process-wide pool, shared by all graphs of equal output shapes."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.graph = RecordedGraph(step)
        self.pool_bytes = self.graph.pool_bytes
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def pooled(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            key = (len(seen), tuple(tensor.shape), tensor.dtype)
            seen.append((OUTPUTS.setdefault(key, torch.zeros_like(tensor)), tensor))
            return seen[-1][0]

        self.outputs = tree_map(pooled, self.graph.outputs)
        self.pairs = seen

    def replay(self) -> None:
        self.graph.replay()
        for mine, tensor in self.pairs:
            mine.copy_(tensor)


class PooledOutputs(KeyedGraphState):
    """A graph state that records with `PooledRecording`."""

    def _record(self, step: Callable[[], Any]) -> PooledRecording:
        return PooledRecording(step)


CAPACITY = 16


class EvictedRecording:
    """A graph that can be evicted and captured again, but still returns the outputs of its first capture."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.graph = step, RecordedGraph(step)
        self.outputs, self.pool_bytes = self.graph.outputs, self.graph.pool_bytes

    def replay(self) -> None:
        self.graph = self.graph or RecordedGraph(self.step)
        self.graph.replay()


class BoundedGraphs(KeyedGraphState):
    """Keeps at most 16 graphs: evicts the oldest, and captures it again at its next replay."""

    def _record(self, step: Callable[[], Any]) -> EvictedRecording:
        alive = [one for one in self._recordings.values() if one.graph is not None]
        if len(alive) >= CAPACITY:
            alive[0].graph = None
        return EvictedRecording(step)


# -- trees --------------------------------------------------------------------------------------------------------


class ShortTokens(TorchTreeOps):
    """Compares tokens as 16 bits, so two tokens of a larger vocabulary can look equal."""

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        short = super().verify_tree(torch.where(drafts < 0, -1, drafts & 0xFFFF), parents, targets & 0xFFFF)
        tokens = torch.where(short.tokens < 0, -1, targets.gather(1, short.accept_index))
        return VerifyResult(tokens, short.accept_lens, short.accept_index)


class FirstPool(TorchTreeOps):
    """Compacts the KV pool of the first call in every call, so the pool of another layer group is never compacted."""

    pool: KVPool | None = None

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        self.pool = self.pool or pool
        super().compact(self.pool, batch, accepted)


WARP = 32


class OneWarp(TorchTreeOps):
    """Compacts with one warp per request and one lane per node, so accepted nodes after the 32nd are not moved."""

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        path = accepted.accept_index[:, :WARP]
        prefix, page_size = batch.prefix_lens.long()[:, None], self._geometry.attention.page_size
        target = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
        pool.move(
            slots_of(batch.page_table, prefix + path[:, 1:], page_size).view(-1),
            slots_of(batch.page_table, prefix + target, page_size).view(-1),
        )


def _mutant(number: int, what: str, why: str, made: type, usage: Any = None) -> Mutant:
    source = f"outside author; {why}"
    return Mutant(f"S{number}", what, source, plugin=made, usage=usage, layouts=("tutorial",), absent=ONLY)


def _cell_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"tail_len": 4}


MUTANTS = (
    _mutant(
        31,
        "Skips the plan while mode, size, total length and longest length are unchanged",
        "a plan cache keyed on totals; fails when requests swap places in the batch (leave and join)",
        plugin(PlanMemo, schedule),
        schedule_usage,
    ),
    _mutant(
        32,
        "Stages plans in a ring of eight pinned rows without a fence",
        "vllm#25279, sglang#28034: fails when the device is more than eight plans behind the host",
        plugin(StagingRing, ring_buffers),
        ring_usage,
    ),
    _mutant(
        33,
        "Stores planned lengths in one workspace that all backends of the process share",
        "FlashInfer wrappers on one workspace: plan(target), plan(draft), run(target)",
        plugin(SharedWorkspace),
    ),
    _mutant(
        34,
        "Sends the worst-case plan for Unknown lengths once, though an Exact batch overwrites it",
        "an Exact prefill between decodes with Unknown lengths",
        plugin(WorstCaseOnce, schedule),
        schedule_usage,
    ),
    _mutant(
        35,
        "Uses the tail length of the last planned draft step in all steps",
        "EAGLE's multi-step graph with one metadata object for all steps",
        plugin(TailCell, cell_buffer),
        _cell_usage,
    ),
    _mutant(
        36,
        "Reallocates a workspace for a large eager batch, while graphs read the old one",
        "workspace resize after capture (vLLM, TensorRT-LLM)",
        plugin(GrownWorkspace),
    ),
    _mutant(
        37,
        "Caches EXTEND's row map by rows, requests and the longest chunk",
        "metadata keyed on (num_tokens, num_reqs, max_query_len): chunks of 3 + 5, then 5 + 3",
        plugin(RowMapCache),
    ),
    _mutant(
        38,
        "Computes the row map as a running sum of marks, which an empty request shifts",
        "scatter and cumsum of an indptr; a preempted or fully cached request without new tokens between others",
        plugin(RowMapByMarks),
    ),
    _mutant(
        39,
        "Writes metadata once per plan, so a capture after a warm-up run contains none",
        "a dirty flag on the host; device graph states run a step once before they capture it",
        plugin(WrittenOnce),
    ),
    _mutant(
        40,
        "Copies only new columns of the page table while a row's first page is unchanged",
        "incremental block tables; a preempted request returns with a cached first page",
        plugin(IncrementalTable, own_table),
        table_usage,
    ),
    _mutant(
        41,
        "Keeps lengths and page tables of the first batch of a size, though engines alternate buffers",
        "persistent views of an engine's buffers; overlap schedulers fill two sets in turn",
        plugin(StaticViews),
    ),
    _mutant(
        42,
        "Caches a constant per module that the first captured graph may allocate",
        "lru_cache on a helper that creates a tensor; its first use is in a capture",
        plugin(CapturedConstant),
    ),
    _mutant(
        43,
        "Recomputes masks only for the address of the first KV cache ever seen",
        "memory profiling or sleep mode replaces the pool, and the masks are never computed again",
        plugin(FirstLayerByAddress),
    ),
    _mutant(
        44,
        "Splits batches larger than any graph, but not the depths of their trees",
        "micro-batches of eager steps; needs a window, trees and more requests than the largest graph",
        plugin(SubBatches),
    ),
    _mutant(
        45,
        "Treats topk 1 as a chain, even if the batch has a tree",
        "n-gram, suffix and Medusa trees with a drafter that has no topk",
        plugin(TopkOneIsChain),
    ),
    _mutant(
        46,
        "Leaves the output unwritten in an eager batch without live requests",
        "an idle data-parallel rank: uninitialised rows reach the all-to-all of the experts",
        plugin(IdleRank),
    ),
    _mutant(
        47,
        "Splits KV by the host's bound, and gives NaN for a part that is empty on the device",
        "split-KV combine with an empty part; overlap scheduling near a multiple of the part size",
        plugin(EmptySplit),
    ),
    _mutant(
        48,
        "Caches the KV width by attention and context limit, without the draft tokens",
        "lru_cache with an incomplete key; the second of two geometries, at the context limit",
        plugin(WidthByContext),
    ),
    _mutant(
        49,
        "Allocates scratch in the first plan, as an inference tensor if that is a warm-up",
        "Inplace update to inference tensor outside InferenceMode: training loops that also generate",
        plugin(InferenceScratch, schedule),
        schedule_usage,
    ),
    _mutant(
        50,
        "Shares graph outputs of one shape among all graphs and graph states",
        "one global graph memory pool for target and draft, with weakly held outputs",
        plugin(graphs=PooledOutputs),
    ),
    _mutant(
        51,
        "Evicts the oldest of more than 16 graphs, and returns its old outputs after recapture",
        "bounded graph caches (TensorRT-LLM); the 17th graph",
        plugin(graphs=BoundedGraphs),
    ),
    _mutant(
        52,
        "Compares tokens as 16-bit integers in verify_tree",
        "uint16 tokens; vocabularies above 65536",
        plugin(tree=ShortTokens),
    ),
    _mutant(
        53,
        "Gathers the layers' addresses in compact only once, from the first pool",
        "a table of KV cache pointers built lazily; hybrid models with two layer groups, target and draft pools",
        plugin(tree=FirstPool),
    ),
    _mutant(
        54,
        "Moves at most the first 32 nodes of a path in compact",
        "one warp per request; long accepted paths of suffix decoding",
        plugin(tree=OneWarp),
    ),
)

KILLER = {
    **dict.fromkeys(("S31", "S40", "S45"), "history.equals_a_fresh_state"),
    **dict.fromkeys(("S32", "S35"), "late.replays_in_flight_are_their_own"),
    "S33": "memory.of_two_plans_is_apart",
    "S34": "graphs.capture_order_does_not_matter",
    "S36": "production.large_graphs_and_larger_batches",
    "S37": "purity.nothing_is_kept_or_moved",
    "S38": "metadata.decodes_to_the_token_history",
    "S39": "graphs.captured_run_is_right",
    **dict.fromkeys(("S41", "S43"), "inputs.may_lie_elsewhere_each_time"),
    "S42": "graphs.a_capture_may_come_first",
    "S44": "inputs.may_be_views_of_one_projection",
    **dict.fromkeys(("S46", "S47"), "lengths.of_any_kind_give_one_result"),
    "S48": "memory.of_geometries_that_differ_is_apart",
    "S49": "inputs.may_come_in_any_grad_mode",
    **dict.fromkeys(("S50", "S51"), "graphs.outputs_stay_while_another_state_replays"),
    "S52": "tree_ops.walk_follows_the_target",
    "S53": "tree_ops.every_pool_is_served",
    "S54": "tree_ops.kept_path_is_made_contiguous",
}
"""Check that must kill each mutant."""
