"""Mutants that need two conditions at once: a mode and an edge, a capture and padding, large pages and trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import ForwardBatch, Tree
from draftmark.graphs import is_recording

from .batches import bits, live_only, tail, words
from .edges import placed
from .mutant import Mutant, around, on_batch

TILE = 64
"""Tokens of the tile of a kernel that has not heard of larger pages."""
IN_PLACE = "it reads the batch's own table and mask"


def _live_at_capture(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """A graph holds the metadata of the rows that were live when it was captured; eager forwards write all."""
    return live_only(backend, batch) if is_recording() else batch


def _baked_padding(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """A graph takes every request that was padding at its capture for padding ever after."""
    if not is_recording():
        return batch
    live = torch.arange(batch.padded_reqs, dtype=torch.int32, device=batch.device) < batch.num_reqs
    return replace(batch, prefix_lens=batch.prefix_lens * live)


def _page_before_whole_pages(*modes: Mode) -> Any:
    """Where L is a multiple of the page size, the tail begins a page too early."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        size, prefix = backend.geometry.attention.page_size, batch.prefix_lens[request].long()
        early = (prefix > 0) & (prefix % size == 0) & (batch.mode in modes)
        page = position // size - early.long()
        return batch.page_table[request, page].long() * size + position % size

    return placed(change)


def _within_a_tile(*modes: Mode) -> Any:
    """Offsets in a page are those in a tile: pages of more tokens have aliases."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        size = backend.geometry.attention.page_size
        offset = position % size
        if batch.mode in modes and size % TILE == 0:
            offset = offset % TILE
        return batch.page_table[request, position // size].long() * size + offset

    return placed(change)


def _later_words_reversed(batch: ForwardBatch) -> Tree:
    unpacked = bits(batch.tail.mask)
    unpacked[:, 1:] = unpacked[:, 1:].flip(-1)
    return Tree(words(unpacked), batch.tail.depth)


def _never_shrinks(name: str) -> Callable[[Any], None]:
    """An entry keeps the largest value that it has held, unless that can be none."""

    def patch(backend: Any) -> None:
        def call(original: Any, batch: ForwardBatch) -> None:
            buffer = backend.arena[name]
            most = backend.geometry.max_kv_len if name == "kv_lens" else backend.geometry.attention.page_size
            kept = buffer.clone()
            original(batch)
            buffer.copy_(torch.where((kept > buffer) & (kept <= most), kept, buffer))

        around(backend, "write_metadata", call)

    return patch


def _with_window(change: Callable[[ForwardBatch, int], int]) -> Callable[[Any], None]:
    """attend() with another window where there is one."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
            right = backend.geometry
            left = right.attention.window_left
            if left >= 0:
                wrong = replace(right.attention, window_left=change(batch, left))
                backend.geometry = replace(right, attention=wrong)
            original(q, cache, batch, out)
            backend.geometry = right

        around(backend, "attend", call)

    return patch


def _flat_depth(batch: ForwardBatch) -> Tree:
    """All of a tail has the root's position: a window never ends inside it."""
    return Tree(batch.tail.mask, torch.zeros_like(batch.tail.depth))


def _first_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, batch.tail.depth[:1].expand_as(batch.tail.depth).contiguous())


def _short_depth(batch: ForwardBatch) -> Tree:
    """Depths in four bits."""
    return Tree(batch.tail.mask, batch.tail.depth & 15)


def _stride_of_verify(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Rows of a draft step find their mask as if each request had D of them."""
    if batch.mode is not Mode.DRAFT or not isinstance(batch.tail, Tree):
        return batch
    request = torch.arange(batch.num_rows) // batch.q_lens[0]
    row = request * backend.geometry.draft.num_draft_tokens + torch.arange(batch.num_rows) % batch.q_lens[0]
    return replace(batch, tail=Tree(batch.tail.mask[row.clamp(max=batch.num_rows - 1)], batch.tail.depth))


def _stride_of_context(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """The page table as one line whose rows are as wide as the context alone would need."""
    table, size = batch.page_table, backend.geometry.attention.page_size
    columns = -(-backend.geometry.limits.max_context_len // size)
    reqs, width = table.shape
    index = torch.arange(reqs)[:, None] * columns + torch.arange(width)
    return replace(batch, page_table=table.reshape(-1)[index])


def _wrapped_reads(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Pages whose flat element offset passes 2**31 are read from where it wraps to."""
    a = backend.geometry.attention
    page = a.page_size * a.num_kv_heads * a.head_dim
    offset = (batch.page_table.long() * page).to(torch.int32)
    return replace(batch, page_table=offset.clamp(min=0) // page)


def _scaled_twice_where_padded(backend: Any) -> None:
    """Heads that a kernel pads to a power of two are scaled in its load and again in its softmax, in VERIFY."""

    def call(original: Any, q: torch.Tensor, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        dim = q.shape[-1]
        again = batch.mode is Mode.VERIFY and dim & (dim - 1)
        original(q * backend.geometry.attention.softmax_scale if again else q, cache, batch, out)

    around(backend, "attend", call)


MUTANTS = (
    Mutant("Z01", "captured metadata covers the requests that were live at capture", "sglang#29262",
           patch=on_batch(_live_at_capture, "write_metadata")),
    Mutant("Z02", "requests that were padding at capture stay padding", "TRT-LLM#17110",
           patch=on_batch(_baked_padding, "write_metadata", "attend")),
    Mutant("Z03", "verify rows stored a page early where L fills its pages", "sglang#15469",
           patch=_page_before_whole_pages(Mode.VERIFY)),
    Mutant("Z03b", "draft rows stored a page early where L fills its pages", "sglang#15469",
           patch=_page_before_whole_pages(Mode.DRAFT, Mode.DRAFT_EXTEND)),
    Mutant("Z04", "mask bits reversed behind the first word", "TRT-LLM#13006", patch=tail(_later_words_reversed)),
    Mutant("Z05", "lengths that only grow", "sglang#10892", patch=_never_shrinks("kv_lens"),
           layouts=("reference",), absent="no kv_lens; Z05b does it to last-page lengths"),
    Mutant("Z05b", "last-page lengths that only grow", "sglang#10892", patch=_never_shrinks("kv_last_page_len"),
           layouts=("csr",), absent="no last-page lengths"),
    Mutant("Z06", "window one too long from the third draft step on", "tokenspeed#613",
           patch=_with_window(lambda x, left: left + (x.mode is Mode.DRAFT and x.step >= 2))),
    Mutant("Z07", "window never ends inside a tree", "tokenspeed#613", patch=tail(_flat_depth)),
    Mutant("Z08", "every request has the first one's depths", "vllm-ascend#8508", patch=tail(_first_depth)),
    Mutant("Z09", "draft rows find their mask by verify's stride", "sglang#27545",
           patch=on_batch(_stride_of_verify, "write_metadata", "attend")),
    Mutant("Z10", "page table read with the context's row width", "sglang#35985",
           patch=on_batch(_stride_of_context, "write_metadata", "attend")),
    Mutant("Z11", "reads wrap where element offsets pass 2**31", "vllm#47671",
           patch=on_batch(_wrapped_reads, "attend"), layouts=("reference",), absent="attend() reads no page table"),
    Mutant("Z12", "verify rows in the second half of a page alias the first", "sglang#24587",
           patch=_within_a_tile(Mode.VERIFY)),
    Mutant("Z12b", "draft rows in the second half of a page alias the first", "sglang#24587",
           patch=_within_a_tile(Mode.DRAFT, Mode.DRAFT_EXTEND)),
    Mutant("Z13", "scale applied twice to heads of 80 or 96 in VERIFY", "sglang#32062",
           patch=_scaled_twice_where_padded),
    Mutant("Z14", "depths of a tree in four bits", "tokenspeed#613", patch=tail(_short_depth)),
)  # fmt: skip
