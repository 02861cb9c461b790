"""Mutants that fail at a boundary: full pages, a third mask word, many requests, long contexts, odd heads, window 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import Causal, ForwardBatch, Tree

from .arenas import edit
from .batches import bits, prefix, tail, words
from .mutant import Mutant, after, around, forgets_cap, on_batch, shaped

CSR = ("csr",)
IN_PLACE = "it reads the batch's table and mask in place"


def placed(change: Callable[[Any, ForwardBatch, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a patch that computes the slots of a batch's rows from their KV positions by another formula."""

    def write(backend: Any, batch: ForwardBatch) -> None:
        row = torch.arange(batch.num_rows, dtype=torch.int32)
        request = torch.searchsorted(batch.q_indptr, row, right=True) - 1
        tails = (
            batch.q_indptr.diff() if batch.uniform is None else torch.full_like(batch.prefix_lens, batch.tail_lens[0])
        )
        position = (batch.prefix_lens + tails)[request] - (batch.q_indptr[request + 1] - row)
        backend.arena["slot_mapping"][: batch.num_rows] = change(backend, batch, request, position.long())

    return edit(write)


def _slot(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    size = backend.geometry.attention.page_size
    return batch.page_table[request, (position // size).long()].long() * size + position % size


def _by_shift(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    size = backend.geometry.attention.page_size
    page = (position >> (size.bit_length() - 1)).clamp(max=batch.page_table.shape[1] - 1)
    return batch.page_table[request, page].long() * size + position % size


def _by_positions(*modes: Mode) -> Any:
    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return _slot(backend, batch, request, batch.positions if batch.mode in modes else position)

    return change


def _page_before(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Look up the page of each position by the position before it, so a page's first token uses the wrong page."""
    size = backend.geometry.attention.page_size
    page = (position - 1).clamp(min=0) // size if size > 1 else position // size
    return batch.page_table[request, page].long() * size + position % size


def _two_pages(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Store a request's new tokens in at most two pages; tokens of a third page land in the second."""
    size = backend.geometry.attention.page_size
    if batch.uniform is None:
        return _slot(backend, batch, request, position)
    page = torch.minimum(position // size, batch.prefix_lens[request] // size + 1)
    return batch.page_table[request, page].long() * size + position % size


def _empty_is_padding(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return torch.where(batch.prefix_lens[request] == 0, position % backend.geometry.attention.page_size,
                       _slot(backend, batch, request, position))  # fmt: skip


def _small_ids(limit: int) -> Any:
    """Compute request numbers modulo `limit`."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return _slot(backend, batch, request % limit, position)

    return change


def _small_pages(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    size = backend.geometry.attention.page_size
    return batch.page_table[request, position // size % 256].long() * size + position % size


def _small_rows(backend: Any, batch: ForwardBatch) -> None:
    slots = backend.arena["slot_mapping"][: batch.num_rows]
    slots[128:] = slots[: batch.num_rows - 128].clone() if batch.num_rows > 128 else slots[128:]


def _mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tail(lambda batch: Tree(change(batch.tail.mask.clone()), batch.tail.depth))


def _third(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 2:] = 0
    return mask


def _bit_32(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 1:] &= ~1
    return mask


def _bound_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, batch.tail.depth + (batch.tail.depth > 0).int())


def _chain_in_draft(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if batch.mode is not Mode.DRAFT or not isinstance(batch.tail, Tree):
        return batch
    depth = torch.arange(batch.tail.depth.shape[1], dtype=torch.int32).expand_as(batch.tail.depth)
    return replace(batch, tail=Tree(batch.tail.mask, depth))


def _all_branches(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if batch.mode is not Mode.DRAFT or batch.step == 0 or not isinstance(batch.tail, Tree):
        return batch
    count, slots = batch.tail_lens[0], torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32)
    own = bits(batch.tail.mask) | (slots < count - batch.q_lens[0])
    return replace(batch, tail=Tree(words(own), batch.tail.depth))


def _unused_alone(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Let tree rows at depth 1 see only themselves, except the first two of these rows."""
    if batch.mode is not Mode.VERIFY or not isinstance(batch.tail, Tree):
        return batch
    seen, each = bits(batch.tail.mask), batch.q_lens[0]
    slot = torch.arange(batch.num_rows) % each
    own = torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32) == slot[:, None, None]
    alone = (batch.tail.depth.reshape(-1) == 1) & (slot > 2)
    return replace(batch, tail=Tree(words(torch.where(alone[:, None, None], own, seen)), batch.tail.depth))


def _siblings(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """In draft step 0, let each branch also see the tail slots of the branches before it."""
    if batch.mode is not Mode.DRAFT or batch.step or not isinstance(batch.tail, Tree):
        return batch
    each = batch.q_lens[0]
    own = torch.arange(batch.num_rows) % each
    seen = torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32) <= own[:, None, None]
    return replace(batch, tail=Tree(words(seen), batch.tail.depth))


def _late_chain(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """If a batch has one live request, replace its draft tree by a chain."""
    return replace(batch, tail=Causal()) if batch.mode is Mode.VERIFY and batch.num_reqs == 1 else batch


def _heads(condition: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a patch that reverses the KV heads of attention shapes that meet the condition."""

    def patch(backend: Any) -> None:
        if not condition(backend.geometry.attention):
            return

        def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
            flipped = replace(cache, k=cache.k.flip(2), v=cache.v.flip(2))
            original(q, flipped, batch, out)

        around(backend, "attend", call)

    return patch


def _dims(condition: Callable[[int], Any]) -> Callable[[Any], None]:
    """Return a patch that zeroes the last element of each head, for head sizes that meet the condition."""

    def patch(backend: Any) -> None:
        if condition(backend.geometry.attention.head_dim):
            after(backend, "attend", lambda q, cache, batch, out: out[..., -1].zero_())

    return patch


def _empty_out(backend: Any) -> None:
    """Write zeros for DECODE rows with an empty prefix, as kernels do for rows without keys."""

    def call(q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        if batch.mode is Mode.DECODE:
            out.masked_fill_((batch.prefix_lens == 0)[:, None, None], 0.0)

    after(backend, "attend", call)


def _wrap(dtype: torch.dtype) -> Any:
    return prefix(lambda b, x: x.prefix_lens.to(dtype).to(torch.int32))


def _full_page(backend: Any, batch: ForwardBatch) -> None:
    size = backend.geometry.attention.page_size
    if size > 1:
        backend.arena["kv_last_page_len"][: batch.padded_reqs].remainder_(size)


def _page_too_many(backend: Any) -> None:
    """Count one page too many when the only request fills its last page."""

    def see(batch: ForwardBatch) -> None:
        size, last = backend.geometry.attention.page_size, backend.arena["kv_last_page_len"][: batch.padded_reqs]
        if size > 1 and batch.padded_reqs == 1:
            backend.arena["kv_indptr"][1] += (last[0] == size).int()

    after(backend, "write_metadata", see)


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


def _stride(backend: Any, batch: ForwardBatch) -> None:
    if batch.mode is Mode.DRAFT_EXTEND:
        rows = torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * (backend.geometry.draft.num_steps + 1)
        backend.arena["qo_indptr"][: batch.padded_reqs + 1] = rows


MUTANTS = (
    Mutant("X01", "Computes pages by a shift, which is right only for powers of two",
           "sglang#15664", patch=placed(_by_shift)),
    Mutant("X02", "Ignores mask words after the second", "TRT-LLM#13081", patch=_mask(_third)),
    Mutant("X03", "Clears bit 31 of each mask word", "TRT-LLM#13006", patch=_mask(lambda m: m & 0x7FFFFFFF)),
    Mutant("X04", "Clears bit 32 of the tail mask", "TRT-LLM#13006", patch=_mask(_bit_32)),
    Mutant("X05", "Treats a window of 0 as no window", "vllm-ascend#8508",
           patch=shaped(window_left=lambda a: a.window_left or -1)),
    Mutant("X06", "Makes the window one token too short for slots after the root",
           "tokenspeed#613", patch=tail(_bound_depth)),
    Mutant("X07", "Measures the window in slots instead of positions in DRAFT",
           "tokenspeed#613", patch=on_batch(_chain_in_draft)),
    Mutant("X08", "Lets later draft steps see all branches", "sglang#32920", patch=on_batch(_all_branches)),
    Mutant("X09", "Lets branches of the first draft step see each other", "sglang#32920", patch=on_batch(_siblings)),
    Mutant("X10", "Lets unused rows see only themselves", "sglang#32920", patch=on_batch(_unused_alone)),
    Mutant("X11", "Reads the tree as a chain when one request is live", "sglang#32920",
           patch=on_batch(_late_chain, "write_metadata", "attend")),
    Mutant("X12", "Reverses the KV heads for groups of 3 query heads",
           "sglang#32062", patch=_heads(lambda a: a.group_size == 3)),
    Mutant("X13", "Reverses the KV heads when there are 3",
           "sglang#32062", patch=_heads(lambda a: a.num_kv_heads == 3)),
    Mutant("X14", "Reverses the KV heads for MHA", "sglang#32062", patch=_heads(lambda a: a.group_size == 1)),
    Mutant("X15", "Loses the last element of heads with more than 128 elements",
           "vllm#34043", patch=_dims(lambda d: d > 128)),
    Mutant("X16", "Loses the last element of heads unless head_dim is a multiple of 8",
           "vllm#34043", patch=_dims(lambda d: d % 8)),
    Mutant("X17", "Ignores the soft cap in EXTEND", "ROCm/ATOM#1591", patch=forgets_cap(Mode.EXTEND)),
    Mutant("X18", "Ignores the soft cap in VERIFY", "ROCm/ATOM#1591", patch=forgets_cap(Mode.VERIFY)),
    Mutant("X19", "Computes slots from the clamped positions in DECODE", "TRT-LLM#16280",
           patch=placed(_by_positions(Mode.DECODE))),
    Mutant("X20", "Computes slots from the depths in VERIFY", "sglang#38187", patch=placed(_by_positions(Mode.VERIFY))),
    Mutant("X21", "Computes slots from the depths in DRAFT", "sglang#38187", patch=placed(_by_positions(Mode.DRAFT))),
    Mutant("X22", "Looks up the first token of a page in the page before", "sglang#15469", patch=placed(_page_before)),
    Mutant("X23", "Stores a tail in at most two pages", "sglang#15469", patch=placed(_two_pages)),
    Mutant("X24", "Treats a live request with an empty prefix as padding",
           "sglang#1779", patch=placed(_empty_is_padding)),
    Mutant("X25", "Truncates request numbers to 7 bits", "vllm#47671", patch=placed(_small_ids(128))),
    Mutant("X26", "Truncates request numbers to 8 bits", "vllm#47671", patch=placed(_small_ids(256))),
    Mutant("X27", "Truncates page columns to 8 bits", "vllm#47671", patch=placed(_small_pages)),
    Mutant("X28", "Truncates row numbers to 7 bits", "vllm#47671", patch=edit(_small_rows)),
    Mutant("X29", "Truncates lengths to 16 bits", "vllm#47671", patch=_wrap(torch.int16)),
    Mutant("X30", "Rounds lengths to bfloat16", "vllm#34043", patch=_wrap(torch.bfloat16)),
    Mutant("X31", "Rounds lengths to float16", "vllm#34043", patch=_wrap(torch.float16)),
    Mutant("X32", "Writes last-page length 0 for a full page of several tokens", "sglang#15469",
           patch=edit(_full_page), layouts=CSR, absent="no last-page lengths"),
    Mutant("X33", "Counts one page too many when the last page is full",
           "sglang#15469", patch=_page_too_many, layouts=CSR,
           absent="no indptr"),
    Mutant("X34", "Keeps the query indptr of the first batch", "sglang#26655", patch=_stale("qo_indptr", slice(None)),
           layouts=CSR, absent="no query indptr"),
    Mutant("X35", "Writes the query indptr with stride num_steps + 1", "sglang#27545", patch=edit(_stride), layouts=CSR,
           absent="no query indptr"),
    Mutant("X36", "Keeps the second mask word of the first batch", "TRT-LLM#13081",
           patch=_stale("tail_mask", slice(1, None)), layouts=CSR, absent=IN_PLACE),
    Mutant("X37", "Keeps the depths of the first batch", "tokenspeed#613", patch=_stale("tail_depth", slice(None)),
           layouts=CSR, absent=IN_PLACE),
    Mutant("X38", "Returns zeros for rows with an empty prefix", "sglang#1779", patch=_empty_out),
)  # fmt: skip
