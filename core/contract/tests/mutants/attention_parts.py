"""Mutants S01 … S24, by outside authors who knew only the tutorial: arithmetic, masks, launches, sizing, `supports`.

`Parts` is the tutorial's correct attention in overridable parts; most mutants override one part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from draftmark import BufferSpec, Geometry, Mode, Role, Unit, ceil_div, maximum
from draftmark.buffers import Init
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree

from .mutant import ONLY, Mutant
from .tutorial import Backend, Plugin

Tensor = torch.Tensor


class Parts(Backend):
    """Attention of the tutorial's backend (tugboat) in overridable parts. This class has no defect."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.geometry, self.arena = geometry, arena
        self.window = self.shape.window_left

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        """Attend request by request, as the tutorial's backend does."""
        first = 0
        for request, (q_len, tail_len) in enumerate(zip(batch.q_lens, batch.tail_lens, strict=True)):
            rows = slice(first, first + q_len)
            first += q_len
            if q_len == 0:
                continue
            prefix = batch.prefix_lens[request].long()
            stored = (torch.arange(self.width, device=q.device) < prefix + tail_len)[:, None, None]
            k, v = (
                torch.where(stored, self.pages(one, batch.page_table[request]).float(), 0.0).repeat_interleave(
                    self.shape.group_size, dim=1
                )
                for one in (cache.k, cache.v)
            )
            seen = self._visible(batch, request, rows, prefix, tail_len)
            weights = self.weights(self.scores(q[rows].float(), k), seen)
            out[rows] = torch.einsum("hqn,nhd->hqd", weights, v).transpose(0, 1).to(out.dtype)

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        """Return the gathered keys or values of one request, ``[width, kv_heads, head_dim]``."""
        return one[table].flatten(0, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return scaled scores, ``[heads, q, width]``."""
        return torch.einsum("qhd,nhd->hqn", q, k) * self.scale

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return the softmax over the visible keys, ``[heads, q, width]``."""
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)

    def _visible(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        key, slot = (torch.arange(n, device=prefix.device) for n in (self.width, tail_len))
        q_len = rows.stop - rows.start
        own = slice(tail_len - q_len, tail_len)
        bits, depth = slot <= slot[own, None], slot
        if isinstance(batch.tail, Tree):
            depth = batch.tail.depth[request].long()
            bits = self.tree_bits(batch.tail.mask[rows], slot, depth[own], prefix)
        seen = (key < prefix).repeat(q_len, 1).scatter(1, (prefix + slot).expand(q_len, -1), bits)
        if self.window >= 0:
            position = key.scatter(0, prefix + slot, prefix + depth)
            seen &= self.in_window(batch, rows, (prefix + depth)[own, None], position)
        return seen

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        """Return which new tokens of the request (draft tree or chain) each row sees, bool ``[q, tail]``."""
        return (words[:, slot // 32] >> (slot % 32).int()) & 1 == 1

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        """Return the key positions that lie in the window of each row position, bool ``[q, width]``."""
        return row - key <= self.window


def plugin(backend: type[Backend], base: type[Plugin] = Plugin) -> type[Plugin]:
    """Return a plugin class that opens `backend`."""

    def open_backend(self: Plugin, geometry: Geometry, arena: Arena) -> Backend:
        return backend(geometry, arena)

    return type(f"{backend.__name__}Plugin", (base,), {"open_backend": open_backend, "__module__": Plugin.__module__})


# -- logits and weights that overflow or underflow ------------------------------------------------------------


class HalfLogits(Parts):
    """Keeps q·k in fp16 and scales it afterwards: values above 65504 become infinite, and inf - inf is NaN."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.shape.q_dtype != "float16":
            return super().scores(q, k)
        return torch.einsum("qhd,nhd->hqn", q, k).half().float() * self.scale


class TileMax(Parts):
    """Uses one maximum for all rows and heads of an MMA tile: rows with logits about 100 below it underflow."""

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        masked = scores.masked_fill(~seen, float("-inf"))
        tile = masked.unflatten(0, (-1, self.shape.group_size))  # the group's heads and all rows share a tile
        shifted = (tile - tile.amax((1, 2, 3), keepdim=True)).exp().flatten(0, 1)
        return shifted / shifted.sum(-1, keepdim=True).clamp(min=1e-30)


class HalfWeights(Parts):
    """Keeps softmax weights in fp16 and flushes subnormals: uniform attention over more than 16k keys sums to zero."""

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        weights = super().weights(scores, seen)
        if self.shape.q_dtype != "float16":
            return weights
        half = weights.half()
        return torch.where(half < 2.0**-14, 0, half).float()


class CapIgnored(Plugin):
    """`supports` accepts a soft cap, but the softmax does not apply it."""

    def supports(self, geometry: Geometry) -> list[str]:
        attention = replace(geometry.attention, logits_soft_cap=0.0)
        return super().supports(replace(geometry, attention=attention))


class LogBase(Parts):
    """Splits KV into parts of 1024 keys; computes the log-sum-exps with base e, but combines them with base 2."""

    SPLIT = 1024

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        width = scores.shape[-1]
        masked = scores.masked_fill(~seen, float("-inf"))
        masked = torch.nn.functional.pad(masked, (0, -width % self.SPLIT), value=float("-inf"))
        splits = masked.unflatten(-1, (-1, self.SPLIT))
        lse = splits.logsumexp(-1, keepdim=True)
        part = (splits - torch.where(lse.isinf(), 0.0, lse)).exp()
        share = torch.exp2(lse - lse.amax(-2, keepdim=True))
        return (part * share / share.sum(-2, keepdim=True)).flatten(-2)[..., :width]


# -- integers that are too narrow -----------------------------------------------------------------------------


class ShortPageIds(Parts):
    """Copies the page table with 16 bits per page: ids of 65536 and more wrap."""

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        return super().pages(one, table & 0xFFFF)


class TwoGiB(Parts):
    """Loads with 32-bit byte offsets: data after 2 GiB of a layer's K or V reads as 0."""

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        page_bytes = one[0].numel() * one.element_size()
        reached = (table.long() + 1) * page_bytes <= 2**31
        return torch.where(reached[:, None, None, None], one[table], 0).flatten(0, 1)


class RoundedDistance(Parts):
    """Computes window distances from positions in q's dtype: bf16 counts exactly to 256, fp16 to 2048."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        dtype = getattr(torch, self.shape.q_dtype)
        return row.to(dtype).float() - key.to(dtype).float() <= self.window


class MagicDivision(Backend):
    """Computes position // P as (position · ceil(2**20 / P)) >> 20: wrong at long contexts unless P is a power of 2."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        size = self.shape.page_size
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, rows, right=True) - 1
        tail = batch.q_indptr.diff() if batch.uniform is None else batch.uniform.tail_len
        position = ((batch.prefix_lens + tail)[request] - (batch.q_indptr[request + 1] - rows)).long()
        column = (position * ceil_div(2**20, size)) >> 20
        page = batch.page_table[request, column].long()
        self.slots[: batch.num_rows] = page * size + (position - column * size).clamp(min=0)


# -- masks ----------------------------------------------------------------------------------------------------


class Mask64(Parts):
    """Loads a mask row as one 64-bit word, so tail slot s from 64 on reads bit s % 64."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        return super().tree_bits(words, slot % 64, depth, prefix)


class PathOnly(Parts):
    """Keeps only the depth + 1 nearest visible slots of a mask row, which drops bits if the mask is not a tree."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        bits = super().tree_bits(words, slot, depth, prefix)
        return bits & (bits.flip(1).cumsum(1).flip(1) <= depth[:, None] + 1)


class TailTile(Parts):
    """Reads the keys of the draft tree from one aligned tile of 128 keys, and drops keys in the next tile."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        bits = super().tree_bits(words, slot, depth, prefix)
        return bits & (slot < 128 - prefix % 128)


class PackedGroup(Parts):
    """Packs rows × group into tiles of 64 and divides by the group with a shift, so a group of 7 counts as 8."""

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        q_len, group = len(seen), self.shape.group_size
        if q_len * group <= 64:
            return super().weights(scores, seen)
        head = torch.arange(scores.shape[0], device=seen.device)[:, None] % group
        packed = torch.arange(q_len, device=seen.device) * group + head
        return super().weights(scores, seen[packed >> (group - 1).bit_length()])


# -- windows --------------------------------------------------------------------------------------------------


class ClampedPositions(Parts):
    """Takes a row's position for the window from `batch.positions`, which is clamped to max_context_len - 1."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        return batch.positions[rows, None] - key <= self.window


class LastToken(Parts):
    """Sends an EXTEND chunk of one token to a decode kernel that does not receive the window."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        inside = super().in_window(batch, rows, row, key)
        return inside | (batch.mode is Mode.EXTEND and rows.stop - rows.start == 1)


class Cascade(Parts):
    """Ignores the window in a prefix of 256 or more tokens that 8 or more requests share (cascade attention)."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        inside = super().in_window(batch, rows, row, key)
        table = batch.page_table
        if len(table) < 8:
            return inside
        shared = (table == table[:1]).all(0).int().cumprod(0).sum() * self.shape.page_size
        shared = torch.minimum(shared, batch.prefix_lens.min())
        return inside | ((shared >= 256) & (key < shared))


class Compiled:
    """A compiled kernel with a compile-time window."""

    def __init__(self, window: int) -> None:
        self.window = window


_COMPILED: WeakValueDictionary[tuple[object, ...], Compiled] = WeakValueDictionary()


class KernelCache(Parts):
    """Caches compiled kernels by a key without the window, so a second layer group uses the window of the first."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        a = geometry.attention
        key = a.num_qo_heads, a.num_kv_heads, a.head_dim, a.page_size, a.q_dtype
        self.kernel = _COMPILED.get(key) or Compiled(a.window_left)
        _COMPILED[key] = self.kernel
        self.window = self.kernel.window


# -- launches, strides and stores -----------------------------------------------------------------------------


class GridLimit(Backend):
    """Launches one block per row and head in gridDim.y: beyond 65535 the launch fails and `out` stays unwritten."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.num_rows * self.shape.num_qo_heads <= 65535:
            super().attend(q, cache, batch, out)


class DenseValues(Backend):
    """Reads v as contiguous. v is often a view of fused QKV rows, while RoPE makes k contiguous."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        heads, dim = v.shape[1:]
        super().write_kv(k, v.as_strided(v.shape, (heads * dim, dim, 1), v.storage_offset()), cache, batch)


class RowsOfEight(Backend):
    """Stores eight rows per block without predication: surplus rows use slots that a larger batch left."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        rows = batch.num_rows
        slots = self.slots[: ceil_div(rows, 8) * 8]
        row = torch.arange(len(slots), device=k.device).clamp(max=rows - 1)
        for new, pages in ((k, cache.k), (v, cache.v)):
            pages.flatten(0, 1).index_copy_(0, slots[rows:], new[row[rows:]])
            pages.flatten(0, 1).index_copy_(0, slots[:rows], new)


class ZeroedSlots(Plugin):
    """Zeroes the slots once at the start, so surplus rows go to the null page only until a batch shrinks."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        rows = ceil_div(geometry.max_rows_any, 8) * 8
        formula = "max_rows_any, rounded up to 8"
        return [BufferSpec("slots", Role.SLOT_MAPPING, (rows,), "int64", Unit.TOKENS, formula, init=Init.ZEROS)]


class ScaledInPlace(Parts):
    """Multiplies the scale into q.float(), which is the caller's own tensor if q is float32."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("qhd,nhd->hqn", q.mul_(self.scale), k)


# -- sizing ---------------------------------------------------------------------------------------------------


def splits_of(geometry: Geometry, requests: int) -> int:
    """Return the number of KV splits of a decode batch that gives every SM a block."""
    return maximum(1, geometry.device.num_sms // (requests * geometry.attention.num_kv_heads))


class FewerSplitMore(Plugin):
    """Sizes partial outputs for the largest batch, although 64 requests of 2 splits need more than 100 of 1 split."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        a = geometry.attention
        parts = geometry.max_reqs * splits_of(geometry, geometry.max_reqs)
        shape = parts, a.num_qo_heads, a.head_dim
        spec = BufferSpec("partials", Role.PARTIAL_OUT, shape, "float32", Unit.ROWS, "max_reqs · splits(max_reqs)")
        return [*super().buffers(geometry), spec]


def partials_used(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of a decode batch's partial outputs: one per request, split and query head."""
    a, decodes = geometry.attention, batch.mode is Mode.DECODE
    parts = batch.padded_reqs * splits_of(geometry, batch.padded_reqs) if decodes else 0
    return {"partials": parts * a.num_qo_heads * a.head_dim * 4}


class SplitDecode(Parts):
    """Decodes with split-KV partial outputs. A slice stops at the buffer's end, where a kernel would write beyond."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        super().attend(q, cache, batch, out)
        if batch.mode is Mode.DECODE:
            requests = batch.padded_reqs
            splits = splits_of(self.geometry, requests)
            parts = self.arena["partials"][: requests * splits].view(requests, splits, *out.shape[1:])
            parts.copy_(out[:, None])
            out.copy_(parts[:, 0])


class TiledQueries(Plugin):
    """Sizes its row buffer with each request padded to 16 rows, but in EXTEND pads only the total number of rows."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        rows = 16 * ceil_div(geometry.limits.max_extend_tokens, 16)
        for mode in (Mode.DECODE, Mode.DRAFT, Mode.VERIFY, Mode.DRAFT_EXTEND):
            rows = maximum(rows, geometry.max_reqs * 16 * ceil_div(geometry.extent(mode).q_len, 16))
        a = geometry.attention
        shape, formula = (rows, a.num_qo_heads, a.head_dim), "max(16·ceil(tokens/16), max_reqs·16·ceil(q/16))"
        return [*super().buffers(geometry), BufferSpec("tiles", Role.WORKSPACE, shape, a.q_dtype, Unit.ROWS, formula)]


def tiles_used(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of all requests' rows, each rounded up to a tile of 16."""
    rows = sum(16 * ceil_div(n, 16) for n in batch.q_lens)
    a = geometry.attention
    return {"tiles": rows * a.num_qo_heads * a.head_dim * (4 if a.q_dtype == "float32" else 2)}


class TileStaging(Parts):
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
            BufferSpec("chunks", Role.SPLIT_SCHEDULE, (chunks,), "int32", Unit.TOKENS, formula),
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
        tail = batch.q_indptr.diff() if batch.uniform is None else batch.uniform.tail_len
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


def _mutant(name: str, what: str, why: str, made: type, usage: Any = None) -> Mutant:
    return Mutant(name, what, f"outside author; {why}", plugin=made, usage=usage, layouts=("tutorial",), absent=ONLY)


MUTANTS = (
    _mutant(
        "S01",
        "Keeps q·k in fp16 before it is scaled, so it overflows at 65504",
        "Qwen2's large K biases in fp16 gave inf and '!!!!' in several engines; ordinary random inputs stay below 100",
        plugin(HalfLogits),
    ),
    _mutant(
        "S02",
        "Uses one softmax maximum for all rows and group heads of a tile",
        "a head or row with small logits next to one with large logits (attention sinks) outputs zero",
        plugin(TileMax),
    ),
    _mutant(
        "S03",
        "Keeps softmax weights in fp16 with subnormals flushed to zero",
        "even attention over a 20k prompt returns zeros; eager fp16 softmax on hardware that flushes subnormals",
        plugin(HalfWeights),
    ),
    _mutant(
        "S04",
        "Accepts a logits soft cap in supports and ignores it in the softmax",
        "Gemma 2 with cap 50: random logits near 3 hardly show it, real logits of 60 do",
        CapIgnored,
    ),
    _mutant(
        "S05",
        "Combines base-e LSEs with exp2 when there are more than 1024 keys",
        "FlashInfer's LSE has base 2, FlashAttention's base e; nearly right if all splits have equal weight",
        plugin(LogBase),
    ),
    _mutant(
        "S06",
        "Truncates page ids to 16 bits",
        "page size 1 with a pool of more than 65536 tokens, as on every server",
        plugin(ShortPageIds),
    ),
    _mutant(
        "S07",
        "Reads zeros after the first 2 GiB of a layer's KV",
        "32-bit byte offsets of buffer loads (ROCm paged attention, Triton int32 offsets) with a large pool",
        plugin(TwoGiB),
    ),
    _mutant(
        "S08",
        "Computes window distances in the dtype of q",
        "arange in bf16 as in HF's RoPE bug; a window model in bf16 after position 256",
        plugin(RoundedDistance),
    ),
    _mutant(
        "S09",
        "Computes the page of a position by a 20-bit multiplier instead of a division",
        "page sizes of hybrid models (vLLM's 544, 784, 1056) are no powers of two; wrong from about 2500 tokens on",
        plugin(MagicDivision),
    ),
    _mutant(
        "S10",
        "Reads tail masks as 64 bits",
        "topk 8 with 10 steps drafts over 72 slots; masks up to 64 slots are right",
        plugin(Mask64),
    ),
    _mutant(
        "S11",
        "Converts a mask row to a path of depth + 1 ancestors",
        "lookahead and n-gram pools have rows that see more than a root path, at equal depths",
        plugin(PathOnly),
    ),
    _mutant(
        "S12",
        "Loses the part of a tree tail after a multiple of 128 keys",
        "block-aligned mask tiles; only if L % 128 + T > 128, so never for short prefixes",
        plugin(TailTile),
    ),
    _mutant(
        "S13",
        "Finds mask rows of packed GQA tiles by a shift, for groups that are no power of two",
        "Qwen 28/4 (group 7) with 10 or more draft tokens",
        plugin(PackedGroup),
    ),
    _mutant(
        "S14",
        "Computes the window from positions that are clamped at the context limit",
        "a window model with draft rows beyond max_context_len, which then see too far left",
        plugin(ClampedPositions),
    ),
    _mutant(
        "S15",
        "Ignores the window for a prefill chunk of exactly one token",
        "the last chunk of a prompt, or a decode mixed into prefill, of Gemma, Mistral, gpt-oss",
        plugin(LastToken),
    ),
    _mutant(
        "S16",
        "Ignores the window in cascade attention over a shared prefix (8 requests, 256 tokens)",
        "vLLM's cascade heuristics with a sliding window; needs requests that share pages",
        plugin(Cascade),
    ),
    _mutant(
        "S17",
        "Omits the window from the key of the kernel cache",
        "two layer groups in one engine (full and sliding); each is right in its own process",
        plugin(KernelCache),
    ),
    _mutant(
        "S18",
        "Writes no output when rows × heads exceed gridDim.y = 65535",
        "2048 prefill rows × 32 heads are one more than fits, and the launch error is ignored",
        plugin(GridLimit),
    ),
    _mutant(
        "S19",
        "Reads v as contiguous",
        "v is a view of the fused QKV projection, while RoPE makes k and q contiguous",
        plugin(DenseValues),
    ),
    _mutant(
        "S20",
        "Stores rows in groups of eight, with surplus rows in slots of an earlier batch",
        "a batch that shrinks: the last row's KV overwrites a token of another request",
        plugin(RowsOfEight, ZeroedSlots),
    ),
    _mutant(
        "S21",
        "Scales q in place when q is float32",
        "aliasing of .float(); a second read of q (second attend, warm-up run, log) sees scaled queries",
        plugin(ScaledInPlace),
    ),
    _mutant(
        "S22",
        "Sizes the partial outputs of split decode by the largest batch",
        "num_kv_splits by SM count: capture sizes 64 and 100 on 132 SMs with one KV head (TP 8)",
        plugin(SplitDecode, FewerSplitMore),
        usage=partials_used,
    ),
    _mutant(
        "S23",
        "Pads the query tiles of EXTEND once instead of per request",
        "chunked prefill with many one-token decodes next to a long chunk",
        plugin(TileStaging, TiledQueries),
        usage=tiles_used,
    ),
    _mutant(
        "S24",
        "Sizes the list of 256-key chunks without the tails at the context limit",
        "max_context_len is a multiple of 256 in production: a full batch at the limit needs one chunk more each",
        plugin(Chunked, ChunkSchedule),
        usage=chunks_used,
    ),
)

KILLER = {
    **dict.fromkeys(("S01", "S02", "S03"), "numerics.survive_any_logits"),
    **dict.fromkeys(("S04", "S15"), "numerics.match_float64"),
    **dict.fromkeys(("S05", "S08"), "production.a_crowd_is_right"),
    **dict.fromkeys(("S06", "S07"), "numerics.reach_past_int32"),
    "S09": "metadata.survives_large_counts",
    "S10": "production.wide_tails_are_right",
    **dict.fromkeys(("S11", "S12"), "lengths.of_any_kind_give_one_result"),
    "S13": "production.every_head_shape_is_right",
    "S14": "numerics.serve_what_is_not_refused",
    "S16": "production.a_common_prefix_is_right",
    "S17": "memory.of_geometries_that_differ_is_apart",
    "S18": "production.many_rows_are_right",
    **dict.fromkeys(("S19", "S20"), "inputs.may_be_views_of_one_projection"),
    "S21": "purity.each_call_writes_its_own",
    "S22": "sizing.covers_processors",
    **dict.fromkeys(("S23", "S24"), "purity.nothing_is_kept_or_moved"),
}
"""Check that must kill each mutant."""
