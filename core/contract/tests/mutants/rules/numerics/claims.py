"""Mutants that checks of `numerics` kill: claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, KVCache, Tree

from ...designs.changes import bits, on_tail, placed, words
from ...designs.layouts import CSR, IN_PLACE, of_tutorial
from ...designs.tutorial_parts import TutorialParts, opens
from ...mutant import Mutant, after, around, on_batch


class ShortPageIds(TutorialParts):
    """Copies the page table with 16 bits per page: ids of 65536 and more wrap."""

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        return super().pages(one, table & 0xFFFF)


class TwoGiB(TutorialParts):
    """Loads with 32-bit byte offsets: data after 2 GiB of a layer's K or V reads as 0."""

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        page_bytes = one[0].numel() * one.element_size()
        reached = (table.long() + 1) * page_bytes <= 2**31
        return torch.where(reached[:, None, None, None], one[table], 0).flatten(0, 1)


class ClampedPositions(TutorialParts):
    """Takes a row's position for the window from `batch.positions`, which is clamped to max_context_len - 1."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        return batch.positions[rows, None] - key <= self.window


def _one_word(batch: ForwardBatch) -> Tree:
    mask = torch.zeros_like(batch.tail.mask)
    mask[:, 0] = batch.tail.mask[:, 0]
    return Tree(mask, batch.tail.depth)


def _by_shift(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    size = backend.geometry.attention.page_size
    page = (position >> (size.bit_length() - 1)).clamp(max=batch.page_table.shape[1] - 1)
    return batch.page_table[request, page].long() * size + position % size


def _mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return on_tail(lambda batch: Tree(change(batch.tail.mask.clone()), batch.tail.depth))


def _third(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 2:] = 0
    return mask


def _bit_32(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 1:] &= ~1
    return mask


def _dims(condition: Callable[[int], Any]) -> Callable[[Any], None]:
    """Return a patch that zeroes the last element of each head, for head sizes that meet the condition."""

    def patch(backend: Any) -> None:
        if condition(backend.geometry.attention.head_dim):
            after(backend, "attend", lambda q, cache, batch, out: out[..., -1].zero_())

    return patch


def _stale(name: str, columns: slice, later: bool = False) -> Callable[[Any], None]:
    """Return a patch that writes part of a buffer only for the first batch of a mode."""

    def patch(backend: Any) -> None:
        seen: set[Any] = set()

        def call(original: Any, batch: ForwardBatch) -> None:
            if name not in set(backend.arena):
                original(batch)
                return
            part = backend.arena[name][:, columns] if columns != slice(None) else backend.arena[name]
            kept = part.clone()
            original(batch)
            if batch.mode in seen:
                part.copy_(kept)
            seen.add(batch.mode)

        around(backend, "write_metadata", call)

    return patch


def _later_words_reversed(batch: ForwardBatch) -> Tree:
    unpacked = bits(batch.tail.mask)
    unpacked[:, 1:] = unpacked[:, 1:].flip(-1)
    return Tree(words(unpacked), batch.tail.depth)


def _never_shrinks(name: str) -> Callable[[Any], None]:
    """Return a patch that never lets an entry of a buffer decrease, unless its old value is impossible."""

    def patch(backend: Any) -> None:
        def call(original: Any, batch: ForwardBatch) -> None:
            buffer = backend.arena[name]
            most = backend.geometry.max_kv_len if name == "kv_lens" else backend.geometry.attention.page_size
            kept = buffer.clone()
            original(batch)
            buffer.copy_(torch.where((kept > buffer) & (kept <= most), kept, buffer))

        around(backend, "write_metadata", call)

    return patch


def _short_depth(batch: ForwardBatch) -> Tree:
    """Truncate depths to four bits."""
    return Tree(batch.tail.mask, batch.tail.depth & 15)


def _wrapped_reads(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Truncate flat element offsets to 32 bits, so pages after 2**31 elements are read from a wrong place."""
    a = backend.geometry.attention
    page = a.page_size * a.num_kv_heads * a.head_dim
    offset = (batch.page_table.long() * page).to(torch.int32)
    return replace(batch, page_table=offset.clamp(min=0) // page)


def _scaled_twice_where_padded(backend: Any) -> None:
    """In VERIFY, scale queries twice if head_dim is not a power of two: once in the load, once in the softmax."""

    def call(original: Any, q: torch.Tensor, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        dim = q.shape[-1]
        again = batch.mode is Mode.VERIFY and dim & (dim - 1)
        original(q * backend.geometry.attention.softmax_scale if again else q, cache, batch, out)

    around(backend, "attend", call)


def _int32_offsets(backend: Any) -> None:
    """Compute flat element offsets in int32: slots with offsets of 2**31 or more become other slots."""

    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows]
        width, right = cache.k.shape[2] * cache.k.shape[3], slots.clone()
        slots.copy_((slots * width).to(torch.int32).clamp(min=0) // width)
        original(k, v, cache, batch)
        slots.copy_(right)

    around(backend, "write_kv", call)


def _int32_in_decode(backend: Any) -> None:
    def call(original: Any, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows]
        width, right = cache.k.shape[2] * cache.k.shape[3], slots.clone()
        if batch.mode is Mode.DECODE:
            slots.copy_((slots * width).to(torch.int32).clamp(min=0) // width)
        original(k, v, cache, batch)
        slots.copy_(right)

    around(backend, "write_kv", call)


MUTANTS = (
    Mutant("R17", "Computes element offsets in 32 bits in DECODE", "vllm#47671", patch=_int32_in_decode),
    of_tutorial(
        "S06",
        "Truncates page ids to 16 bits",
        "page size 1 with a pool of more than 65536 tokens, as on every server",
        opens(ShortPageIds),
    ),
    of_tutorial(
        "S07",
        "Reads zeros after the first 2 GiB of a layer's KV",
        "32-bit byte offsets of buffer loads (ROCm paged attention, Triton int32 offsets) with a large pool",
        opens(TwoGiB),
    ),
    of_tutorial(
        "S14",
        "Computes the window from positions that are clamped at the context limit",
        "a window model with draft rows beyond max_context_len, which then see too far left",
        opens(ClampedPositions),
    ),
    Mutant("V14", "Reads only the first mask word", "TRT-LLM#13081", patch=on_tail(_one_word)),
    Mutant("V62", "Computes element offsets in 32 bits when it stores KV", "flashinfer#3136", patch=_int32_offsets),
    Mutant("X01", "Computes pages by a shift, which is right only for powers of two",
           "sglang#15664", patch=placed(_by_shift)),
    Mutant("X02", "Ignores mask words after the second", "TRT-LLM#13081", patch=_mask(_third)),
    Mutant("X03", "Clears bit 31 of each mask word", "TRT-LLM#13006", patch=_mask(lambda m: m & 0x7FFFFFFF)),
    Mutant("X04", "Clears bit 32 of the tail mask", "TRT-LLM#13006", patch=_mask(_bit_32)),
    Mutant("X15", "Loses the last element of heads with more than 128 elements",
           "vllm#34043", patch=_dims(lambda d: d > 128)),
    Mutant("X16", "Loses the last element of heads unless head_dim is a multiple of 8",
           "vllm#34043", patch=_dims(lambda d: d % 8)),
    Mutant("X34", "Keeps the query indptr of the first batch", "sglang#26655", patch=_stale("qo_indptr", slice(None)),
           layouts=CSR, absent="no query indptr"),
    Mutant("X36", "Keeps the second mask word of the first batch", "TRT-LLM#13081",
           patch=_stale("tail_mask", slice(1, None)), layouts=CSR, absent=IN_PLACE),
    Mutant("X37", "Keeps the depths of the first batch", "tokenspeed#613", patch=_stale("tail_depth", slice(None)),
           layouts=CSR, absent=IN_PLACE),
    Mutant("Z04", "Reverses the bits of mask words after the first",
           "TRT-LLM#13006", patch=on_tail(_later_words_reversed)),
    Mutant("Z05", "Never decreases a length", "sglang#10892", patch=_never_shrinks("kv_lens"),
           layouts=("reference",), absent="no kv_lens; Z05b does it to last-page lengths"),
    Mutant("Z05b", "Never decreases a last-page length", "sglang#10892", patch=_never_shrinks("kv_last_page_len"),
           layouts=("csr",), absent="no last-page lengths"),
    Mutant("Z11", "Wraps reads at element offsets of 2**31", "vllm#47671",
           patch=on_batch(_wrapped_reads, "attend"), layouts=("reference",), absent="attend reads no page table"),
    Mutant("Z13", "Applies the scale twice to heads of 80 or 96 elements in VERIFY", "sglang#32062",
           patch=_scaled_twice_where_padded),
    Mutant("Z14", "Truncates tree depths to four bits", "tokenspeed#613", patch=on_tail(_short_depth)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("R17", "S06", "S07"), "numerics.reach_past_int32"),
    "S14": "numerics.serve_what_is_not_refused",
}
