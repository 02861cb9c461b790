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
from .boundaries import placed
from .mutant import Mutant, around, on_batch

TILE = 64
"""Tile size, in tokens, of a kernel that was written for smaller pages."""
IN_PLACE = "it reads the batch's table and mask in place"


def _live_at_capture(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Write metadata only for the requests that are live at capture, also in every replay; eager forwards write all."""
    return live_only(backend, batch) if is_recording() else batch


def _baked_padding(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Keep prefix length 0 in every replay for requests that were padding when the graph was captured."""
    if not is_recording():
        return batch
    live = torch.arange(batch.padded_reqs, dtype=torch.int32, device=batch.device) < batch.num_reqs
    return replace(batch, prefix_lens=batch.prefix_lens * live)


def _page_before_whole_pages(*modes: Mode) -> Any:
    """Store new tokens one page too early when the prefix length is a multiple of the page size."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        size, prefix = backend.geometry.attention.page_size, batch.prefix_lens[request].long()
        early = (prefix > 0) & (prefix % size == 0) & (batch.mode in modes)
        page = position // size - early.long()
        return batch.page_table[request, page].long() * size + position % size

    return placed(change)


def _within_a_tile(*modes: Mode) -> Any:
    """Compute offsets in a page modulo a tile, so slots of larger pages alias each other."""

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


def _with_window(change: Callable[[ForwardBatch, int], int]) -> Callable[[Any], None]:
    """Return a patch that attends with another window when the geometry has a window."""

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
    """Give all nodes of the draft tree the root's position, so a window never ends inside the tree."""
    return Tree(batch.tail.mask, torch.zeros_like(batch.tail.depth))


def _first_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, batch.tail.depth[:1].expand_as(batch.tail.depth).contiguous())


def _short_depth(batch: ForwardBatch) -> Tree:
    """Truncate depths to four bits."""
    return Tree(batch.tail.mask, batch.tail.depth & 15)


def _stride_of_verify(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Look up the mask rows of a draft step with the row stride of VERIFY (D rows per request)."""
    if batch.mode is not Mode.DRAFT or not isinstance(batch.tail, Tree):
        return batch
    request = torch.arange(batch.num_rows) // batch.q_lens[0]
    row = request * backend.geometry.draft.num_draft_tokens + torch.arange(batch.num_rows) % batch.q_lens[0]
    return replace(batch, tail=Tree(batch.tail.mask[row.clamp(max=batch.num_rows - 1)], batch.tail.depth))


def _stride_of_context(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Index the flat page table with a row width that covers only max_context_len."""
    table, size = batch.page_table, backend.geometry.attention.page_size
    columns = -(-backend.geometry.limits.max_context_len // size)
    reqs, width = table.shape
    index = torch.arange(reqs)[:, None] * columns + torch.arange(width)
    return replace(batch, page_table=table.reshape(-1)[index])


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


MUTANTS = (
    Mutant("Z01", "Captures metadata only for the requests that are live at capture", "sglang#29262",
           patch=on_batch(_live_at_capture, "write_metadata")),
    Mutant("Z02", "Treats requests that were padding at capture as padding in every replay", "TRT-LLM#17110",
           patch=on_batch(_baked_padding, "write_metadata", "attend")),
    Mutant("Z03", "Stores verify rows one page too early when the prefix fills its pages", "sglang#15469",
           patch=_page_before_whole_pages(Mode.VERIFY)),
    Mutant("Z03b", "Stores draft rows one page too early when the prefix fills its pages", "sglang#15469",
           patch=_page_before_whole_pages(Mode.DRAFT, Mode.DRAFT_EXTEND)),
    Mutant("Z04", "Reverses the bits of mask words after the first",
           "TRT-LLM#13006", patch=tail(_later_words_reversed)),
    Mutant("Z05", "Never decreases a length", "sglang#10892", patch=_never_shrinks("kv_lens"),
           layouts=("reference",), absent="no kv_lens; Z05b does it to last-page lengths"),
    Mutant("Z05b", "Never decreases a last-page length", "sglang#10892", patch=_never_shrinks("kv_last_page_len"),
           layouts=("csr",), absent="no last-page lengths"),
    Mutant("Z06", "Makes the window one token too long from the third draft step on", "tokenspeed#613",
           patch=_with_window(lambda x, left: left + (x.mode is Mode.DRAFT and x.step >= 2))),
    Mutant("Z07", "Never ends a window inside a tree", "tokenspeed#613", patch=tail(_flat_depth)),
    Mutant("Z08", "Gives every request the depths of the first one", "vllm-ascend#8508", patch=tail(_first_depth)),
    Mutant("Z09", "Looks up the mask of draft rows with the stride of VERIFY", "sglang#27545",
           patch=on_batch(_stride_of_verify, "write_metadata", "attend")),
    Mutant("Z10", "Reads the page table with a row width for the context limit", "sglang#35985",
           patch=on_batch(_stride_of_context, "write_metadata", "attend")),
    Mutant("Z11", "Wraps reads at element offsets of 2**31", "vllm#47671",
           patch=on_batch(_wrapped_reads, "attend"), layouts=("reference",), absent="attend reads no page table"),
    Mutant("Z12", "Stores verify rows of a page's second half in the first half", "sglang#24587",
           patch=_within_a_tile(Mode.VERIFY)),
    Mutant("Z12b", "Stores draft rows of a page's second half in the first half", "sglang#24587",
           patch=_within_a_tile(Mode.DRAFT, Mode.DRAFT_EXTEND)),
    Mutant("Z13", "Applies the scale twice to heads of 80 or 96 elements in VERIFY", "sglang#32062",
           patch=_scaled_twice_where_padded),
    Mutant("Z14", "Truncates tree depths to four bits", "tokenspeed#613", patch=tail(_short_depth)),
)  # fmt: skip
