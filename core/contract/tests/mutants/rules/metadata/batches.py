"""Mutants that checks of `metadata` kill: batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.runtime import Causal, ForwardBatch, Tree

from ...designs.changes import (
    FIRST,
    bits,
    edit,
    live_only,
    on_indptr,
    on_prefix,
    on_table,
    on_tail,
    placed,
    slot_of,
    within_a_tile,
    words,
)
from ...designs.layouts import CSR, of_tutorial
from ...designs.tutorial_plans import Mapped, plugin
from ...mutant import Mutant, after, on_batch


def _high_bits(batch: ForwardBatch) -> Tree:
    above = torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32) >= batch.tail_lens[0]
    return Tree(words(bits(batch.tail.mask) | above), batch.tail.depth)


def _step_zero(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if batch.mode is not Mode.DRAFT:
        return batch
    tails = (backend.geometry.draft.topk,) * batch.padded_reqs
    kept = batch.tail if isinstance(batch.tail, Causal) else Tree(batch.tail.mask, batch.tail.depth[:, : tails[0]])
    return replace(batch, step=0, tail_lens=tails, tail=kept)


def _stride_of_steps(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    if batch.mode is not Mode.DRAFT_EXTEND:
        return batch.q_indptr
    return torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * (backend.geometry.draft.num_steps + 1)


def _padding_on_live(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    pad = (batch.prefix_lens == 0) & (batch.page_table[:, 0] == 0)
    return torch.where(pad[:, None], batch.page_table[:1], batch.page_table)


def _t(batch: ForwardBatch) -> torch.Tensor:
    return torch.tensor(0, dtype=torch.int32) + (batch.tail_lens[0] if batch.uniform else 0)


def _by_positions(*modes: Mode) -> Any:
    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return slot_of(backend, batch, request, batch.positions if batch.mode in modes else position)

    return change


def _page_before(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Look up the page of each position by the position before it, so a page's first token uses the wrong page."""
    size = backend.geometry.attention.page_size
    page = (position - 1).clamp(min=0) // size if size > 1 else position // size
    return batch.page_table[request, page].long() * size + position % size


def _two_pages(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Store a request's new tokens in at most two pages; tokens of a third page land in the second."""
    size = backend.geometry.attention.page_size
    if not batch.uniform:
        return slot_of(backend, batch, request, position)
    page = torch.minimum(position // size, batch.prefix_lens[request] // size + 1)
    return batch.page_table[request, page].long() * size + position % size


def _empty_is_padding(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return torch.where(batch.prefix_lens[request] == 0, position % backend.geometry.attention.page_size,
                       slot_of(backend, batch, request, position))  # fmt: skip


def _small_rows(backend: Any, batch: ForwardBatch) -> None:
    slots = backend.arena["slot_mapping"][: batch.num_rows]
    slots[128:] = slots[: batch.num_rows - 128].clone() if batch.num_rows > 128 else slots[128:]


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


def _stride(backend: Any, batch: ForwardBatch) -> None:
    if batch.mode is Mode.DRAFT_EXTEND:
        rows = torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * (backend.geometry.draft.num_steps + 1)
        backend.arena["qo_indptr"][: batch.padded_reqs + 1] = rows


def _page_before_whole_pages(*modes: Mode) -> Any:
    """Store new tokens one page too early when the prefix length is a multiple of the page size."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        size, prefix = backend.geometry.attention.page_size, batch.prefix_lens[request].long()
        early = (prefix > 0) & (prefix % size == 0) & (batch.mode in modes)
        page = position // size - early.long()
        return batch.page_table[request, page].long() * size + position % size

    return placed(change)


def _stride_of_context(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Index the flat page table with a row width that covers only max_context_len."""
    table, size = batch.page_table, backend.geometry.attention.page_size
    columns = -(-backend.geometry.limits.max_context_len // size)
    reqs, width = table.shape
    index = torch.arange(reqs)[:, None] * columns + torch.arange(width)
    return replace(batch, page_table=table.reshape(-1)[index])


def _captures_something(backend: Any) -> None:
    if not backend.geometry.limits.capture_batch_sizes:
        raise RuntimeError("max() arg is an empty sequence")


def _first_page_size(backend: Any) -> None:
    """Compute slots with the page size of the first geometry that the process opened."""
    size = backend.geometry.attention.page_size
    first = FIRST.setdefault("page", size)

    def then(batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows]
        slots.copy_(torch.where(slots >= 0, slots // size * first + slots % size, slots))

    after(backend, "write_metadata", then)


def _one_row_more(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Give attention a draft batch of topk + 1 rows per request instead of topk."""
    if batch.mode is not Mode.DRAFT:
        return batch
    rows = backend.geometry.draft.topk + 1
    return replace(batch, q_indptr=torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * rows)


class RowMapByMarks(Mapped):
    """Maps rows to requests by a running sum of marks at first rows; an empty request shares its mark with the next."""

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        marks = torch.zeros(batch.num_rows + 1, dtype=torch.int64, device=batch.device)
        marks.index_fill_(0, batch.q_indptr[:-1].long(), 1)
        return marks[: batch.num_rows].cumsum(0) - 1


MUTANTS = (
    Mutant("M12", "Computes row offsets with stride num_steps + 1", "sglang#27545", patch=on_indptr(_stride_of_steps)),
    Mutant(
        "M22",
        "Counts the tail twice in DRAFT_EXTEND",
        "sglang#26512",
        patch=on_prefix(lambda b, x: x.prefix_lens + _t(x), Mode.DRAFT_EXTEND),
    ),
    Mutant(
        "M28",
        "Writes metadata only for live requests, though the launch is padded",
        "sglang#29262",
        patch=on_batch(live_only, "write_metadata"),
    ),
    Mutant("M36", "Computes slots by the page size of the process's first geometry", "vllm-ascend#13372",
           patch=_first_page_size, layouts=("reference", "csr")),
    Mutant("M39", "Describes a draft step with the row count of another mode", "vllm-ascend#12296",
           patch=on_batch(_one_row_more, "write_metadata")),
    Mutant("R20", "Raises in open_backend when no graph size is captured", "–", patch=_captures_something),
    of_tutorial(
        "S38",
        "Computes the row map as a running sum of marks, which an empty request shifts",
        "scatter and cumsum of an indptr; a preempted or fully cached request without new tokens between others",
        plugin(RowMapByMarks),
    ),
    Mutant("V01", "Starts the tail one token too late", "sglang#15469",
           patch=on_prefix(lambda b, x: x.prefix_lens + 1)),
    Mutant(
        "V02",
        "Starts the tail one token too early, except for empty prefixes",
        "vllm#8145",
        patch=on_prefix(lambda b, x: (x.prefix_lens - 1).clamp(min=0)),
    ),
    Mutant(
        "V03",
        "Treats an empty prefix as one token",
        "sglang#1779",
        patch=on_prefix(lambda b, x: x.prefix_lens.clamp(min=1)),
    ),
    Mutant(
        "V04",
        "Leaves the tail out of the length in VERIFY",
        "sglang#26512",
        patch=on_prefix(lambda b, x: (x.prefix_lens - _t(x)).clamp(min=0), Mode.VERIFY),
    ),
    Mutant(
        "V07",
        "Rounds lengths down to whole pages",
        "sglang#15469",
        patch=on_prefix(lambda b, x: x.prefix_lens // b.geometry.attention.page_size * b.geometry.attention.page_size),
    ),
    Mutant("V08", "Treats every draft step as step 0", "sglang#25077", patch=on_batch(_step_zero)),
    Mutant(
        "V12",
        "Sets the mask bits after the tail",
        "flashinfer#1028",
        patch=on_tail(_high_bits),
        layouts=("csr",),
        absent="it reads the batch's mask in place, and never the bits at or above T",
    ),
    Mutant("V21", "Stores padded rows on the first request's pages", "lmdeploy#4569", patch=on_table(_padding_on_live)),
    Mutant(
        "V22",
        "Swaps the first two pages",
        "sglang#38187",
        patch=on_table(
            lambda b, x: (
                torch.cat((x.page_table[:, 1:2], x.page_table[:, :1], x.page_table[:, 2:]), 1)
                if x.page_table.shape[1] > 1
                else x.page_table
            )
        ),
    ),
    Mutant(
        "V24",
        "Reads the first request's pages for every request",
        "sglang#26019",
        patch=on_table(lambda b, x: x.page_table[:1].expand_as(x.page_table)),
    ),
    Mutant("X19", "Computes slots from the clamped positions in DECODE", "TRT-LLM#16280",
           patch=placed(_by_positions(Mode.DECODE))),
    Mutant("X20", "Computes slots from the depths in VERIFY", "sglang#38187", patch=placed(_by_positions(Mode.VERIFY))),
    Mutant("X21", "Computes slots from the depths in DRAFT", "sglang#38187", patch=placed(_by_positions(Mode.DRAFT))),
    Mutant("X22", "Looks up the first token of a page in the page before", "sglang#15469", patch=placed(_page_before)),
    Mutant("X23", "Stores a tail in at most two pages", "sglang#15469", patch=placed(_two_pages)),
    Mutant("X24", "Treats a live request with an empty prefix as padding",
           "sglang#1779", patch=placed(_empty_is_padding)),
    Mutant("X28", "Truncates row numbers to 7 bits", "vllm#47671", patch=edit(_small_rows)),
    Mutant("X32", "Writes last-page length 0 for a full page of several tokens", "sglang#15469",
           patch=edit(_full_page), layouts=CSR, absent="no last-page lengths"),
    Mutant("X33", "Counts one page too many when the last page is full",
           "sglang#15469", patch=_page_too_many, layouts=CSR,
           absent="no indptr"),
    Mutant("X35", "Writes the query indptr with stride num_steps + 1", "sglang#27545", patch=edit(_stride),
           layouts=CSR,
           absent="no query indptr"),
    Mutant("Z03", "Stores verify rows one page too early when the prefix fills its pages", "sglang#15469",
           patch=_page_before_whole_pages(Mode.VERIFY)),
    Mutant("Z03b", "Stores draft rows one page too early when the prefix fills its pages", "sglang#15469",
           patch=_page_before_whole_pages(Mode.DRAFT, Mode.DRAFT_EXTEND)),
    Mutant("Z10", "Reads the page table with a row width for the context limit", "sglang#35985",
           patch=on_batch(_stride_of_context, "write_metadata", "attend")),
    Mutant("Z12", "Stores verify rows of a page's second half in the first half", "sglang#24587",
           patch=within_a_tile(Mode.VERIFY)),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "R20",
        "S38",
    ),
    "metadata.decodes_to_the_token_history",
)
