"""Mutants that checks of `purity` kill: kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import BufferSpec, Geometry, Mode, ceil_div, maximum
from draftmark.runtime import Arena, ForwardBatch, KVCache, is_recording

from ...designs.layouts import of_tutorial
from ...designs.tutorial import Backend, Plugin
from ...designs.tutorial_parts import TutorialParts, opens
from ...designs.tutorial_plans import Mapped, plugin
from ...designs.workspaces import short_if
from ...mutant import Mutant, after, around, new_slots, resized


class TiledQueries(Plugin):
    """Sizes its row buffer with each request padded to 16 rows, but in EXTEND pads only the total number of rows."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        rows = 16 * ceil_div(geometry.limits.max_extend_tokens, 16)
        for mode in (Mode.DECODE, Mode.DRAFT, Mode.VERIFY, Mode.DRAFT_EXTEND):
            rows = maximum(rows, geometry.max_reqs * 16 * ceil_div(geometry.extent(mode).q_len, 16))
        a = geometry.attention
        shape, formula = (rows, a.num_qo_heads, a.head_dim), "max(16·ceil(tokens/16), max_reqs·16·ceil(q/16))"
        return [*super().buffers(geometry), BufferSpec("tiles", shape, a.q_dtype, formula)]


def tiles_used(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of all requests' rows, each rounded up to a tile of 16."""
    rows = sum(16 * ceil_div(n, 16) for n in batch.q_lens)
    a = geometry.attention
    return {"tiles": rows * a.num_qo_heads * a.head_dim * (4 if a.q_dtype == "float32" else 2)}


class TileStaging(TutorialParts):
    """Copies queries to a buffer in which each request is padded to 16 rows, and attends with these copies."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        tiles, staged = self.arena["tiles"], torch.empty_like(q)
        row = first = 0
        for n in batch.q_lens:
            tiles[first : first + n].copy_(q[row : row + n])
            staged[row : row + n] = tiles[first : first + n]
            row, first = row + n, first + 16 * ceil_div(n, 16)
        super().attend(staged, cache, batch, out)


CHUNK = 256


class ChunkSchedule(Plugin):
    """Sizes the list of 256-key chunks for max_prefix_len, although draft tokens can fill one chunk more."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        chunks = geometry.max_reqs * ceil_div(geometry.max_prefix_len, CHUNK)
        formula = "max_reqs · ceil(max_prefix_len / 256)"
        return [
            *super().buffers(geometry),
            BufferSpec("chunks", (chunks,), "int32", formula),
        ]


def chunks_used(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of the chunk list, from the host's length bounds."""
    bounds = (*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs))
    return {"chunks": 4 * sum(ceil_div(n + t, CHUNK) for n, t in zip(bounds, batch.tail_lens, strict=True))}


class Chunked(Backend):
    """Writes a list with the request of each KV chunk, in request order."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.chunks, self.most = arena["chunks"], ceil_div(geometry.max_kv_len, CHUNK)

    def write_metadata(self, batch: ForwardBatch) -> None:
        super().write_metadata(batch)
        tail = batch.tail_lens[0] if batch.uniform else batch.q_indptr.diff()
        counts = ((batch.prefix_lens + tail + CHUNK - 1) // CHUNK).long()
        number = torch.arange(self.most, device=batch.device)
        at = (counts.cumsum(0) - counts)[:, None] + number
        request = torch.arange(len(counts), device=batch.device)[:, None].expand_as(at)
        live = number < counts[:, None]
        # The index tensor has a fixed size. Its unused elements write the entry of an existing chunk once more.
        some = counts.argmax().view(1)
        at = torch.where(live, at, at[:, 0].index_select(0, some))
        request = torch.where(live, request, some)
        self.chunks.index_copy_(0, at.flatten(), request.flatten().int())


def _plan_by_size(backend: Any) -> None:
    """Cache the plan by batch size and ignore the mode."""
    kept: dict[int, Any] = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        backend._widths = kept.setdefault(batch.padded_reqs, backend._widths)

    around(backend, "plan", call)


def _new_buffer(backend: Any) -> None:
    """Allocate a new slot mapping in plan."""

    def call(original: Any, batch: ForwardBatch) -> None:
        new_slots(backend)
        original(batch)

    around(backend, "plan", call)


def _keeps(backend: Any) -> None:
    backend.log = []
    after(backend, "attend", lambda q, cache, batch, out: backend.log.append(out.clone()))


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


def _first_table(backend: Any) -> None:
    """Use the page table of the first batch of a size for all later batches of that size."""
    backend.tables = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        original(replace(batch, page_table=backend.tables.setdefault(batch.padded_reqs, batch.page_table)))

    around(backend, "write_metadata", call)


def _first_lengths(backend: Any) -> None:
    backend.first = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        kept = backend.first.setdefault((batch.mode, batch.padded_reqs), batch.prefix_lens)
        original(replace(batch, prefix_lens=kept))

    around(backend, "write_metadata", call)


def _lazy_scratch(backend: Any) -> None:
    """Attend into a scratch tensor that is allocated when an output shape occurs for the first time."""
    backend.scratch = {}

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        work = backend.scratch.setdefault(tuple(out.shape), torch.empty_like(out))
        original(q, cache, batch, work)
        out.copy_(work)

    around(backend, "attend", call)


def _grown_scratch(backend: Any) -> None:
    """Attend into one scratch tensor, and reallocate it when a batch has a larger output."""
    backend.work = None

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        if backend.work is None or len(backend.work) < len(out):
            backend.work = torch.empty_like(out)
        original(q, cache, batch, backend.work[: len(out)])
        out.copy_(backend.work[: len(out)])

    around(backend, "attend", call)


def _planned_batch(backend: Any) -> None:
    """Write the metadata of the last batch given to plan(), even if write_metadata receives another batch."""
    after(backend, "plan", lambda batch: setattr(backend, "planned", batch))
    around(backend, "write_metadata", lambda original, batch: original(backend.planned))


def _written_batch(backend: Any) -> None:
    """Attend with the last batch given to plan(), even if attend receives another batch."""
    after(backend, "plan", lambda batch: setattr(backend, "planned", batch))
    around(backend, "attend", lambda original, q, cache, batch, out: original(q, cache, backend.planned, out))


def _regrown(backend: Any) -> None:
    """Allocate a new slot mapping whenever a batch is larger than all earlier ones."""
    most = [0]

    def call(original: Any, batch: ForwardBatch) -> None:
        if batch.num_rows > most[0] and not is_recording():
            most[0] = batch.num_rows
            new_slots(backend)
        original(batch)

    around(backend, "write_metadata", call)


MUTANTS = (
    Mutant("M14b", "Caches the plan by batch size and ignores the mode", "sglang#32062", patch=_plan_by_size),
    Mutant("M20", "Allocates a new buffer in plan", "sglang#27664", patch=_new_buffer),
    of_tutorial(
        "S23",
        "Pads the query tiles of EXTEND once instead of per request",
        "chunked prefill with many one-token decodes next to a long chunk",
        opens(TileStaging, TiledQueries),
        usage=tiles_used,
    ),
    of_tutorial(
        "S24",
        "Sizes the list of 256-key chunks without the tails at the context limit",
        "max_context_len is a multiple of 256 in production: a full batch at the limit needs one chunk more each",
        opens(Chunked, ChunkSchedule),
        usage=chunks_used,
    ),
    of_tutorial(
        "S37",
        "Caches EXTEND's row map by rows, requests and the longest chunk",
        "metadata keyed on (num_tokens, num_reqs, max_query_len): chunks of 3 + 5, then 5 + 3",
        plugin(RowMapCache),
    ),
    Mutant("V34", "Keeps a new tensor in every step", "TRT-LLM#16290", patch=_keeps),
    Mutant("W18", "Sizes the slot mapping one row too small with a window and topk above 2", "sglang#29450",
           resized("slot_mapping", short_if(lambda g: g.attention.window_left >= 0 and g.draft.topk > 2))),
    Mutant("W69", "Keeps the page table of the first batch", "sglang#26655", patch=_first_table),
    Mutant("W70", "Keeps the lengths of the first batch", "sglang#26655", patch=_first_lengths),
    Mutant("W71", "Allocates scratch when a shape occurs for the first time", "sglang#27664", patch=_lazy_scratch),
    Mutant("W72", "Reallocates scratch for larger batches", "rtp-llm#1259", patch=_grown_scratch),
    Mutant("W73", "Writes the metadata of the last planned batch", "sglang#32467", patch=_planned_batch),
    Mutant("W74", "Attends the last planned batch", "sglang#32467", patch=_written_batch),
    Mutant("W86", "Reallocates the slot mapping for a larger batch", "sglang#27664", patch=_regrown),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "S23",
        "S24",
        "S37",
    ),
    "purity.nothing_is_kept_or_moved",
)
