"""Mutants of the metadata that write_metadata leaves in the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import ForwardBatch

from .mutant import Mutant, after, around

IN_PLACE = "it reads the batch's table and mask in place"


def edit(change: Callable[[Any, ForwardBatch], None]) -> Callable[[Any], None]:
    """Return a patch that changes the arena after write_metadata."""
    return lambda backend: after(backend, "write_metadata", lambda batch: change(backend, batch))


def frozen_rows(name: str) -> Callable[[Any], None]:
    """Return a patch that leaves the entries of padded requests or rows unchanged."""

    def patch(backend: Any) -> None:
        def call(original: Any, batch: ForwardBatch) -> None:
            buffer = backend.arena[name]
            live = sum(batch.q_lens[: batch.num_reqs]) if name == "slot_mapping" else batch.num_reqs
            kept = buffer.clone()
            original(batch)
            buffer[live:] = kept[live:]

        around(backend, "write_metadata", call)

    return patch


def _pageable(backend: Any) -> None:
    after(backend, "write_metadata", lambda batch: backend.arena["slot_mapping"][:1].add_(torch.tensor([0, 0])[:1]))


def _strays(entry: Callable[[torch.Tensor], int]) -> Callable[[Any], None]:
    """Return a patch that writes zero to one entry outside a buffer. `entry` is relative to the buffer's start.

    The patch writes only if the index is inside the arena's storage.
    """

    def write(backend: Any, batch: ForwardBatch) -> None:
        buffer = backend.arena["slot_mapping"]
        at, room = buffer.storage_offset() + entry(buffer), buffer.untyped_storage().nbytes() // buffer.itemsize
        if batch.mode is not Mode.EXTEND and batch.padded_reqs > 4 and 0 <= at < room:
            torch.as_strided(buffer, (1,), (1,), at).zero_()

    return edit(write)


def _int32_slots(backend: Any, batch: ForwardBatch) -> None:
    slots = backend.arena["slot_mapping"][: batch.num_rows]
    slots.copy_(slots.to(torch.int32))


def _written_once(backend: Any) -> None:
    """Skip write_metadata while mode, step and row counts are those of the previous batch."""
    last: list[Any] = [None]

    def call(original: Any, batch: ForwardBatch) -> None:
        key = (batch.mode, batch.step, batch.q_lens)
        if key != last[0]:
            last[0] = key
            original(batch)

    around(backend, "write_metadata", call)


def _units(backend: Any, batch: ForwardBatch) -> None:
    size = backend.geometry.attention.page_size
    slots = backend.arena["slot_mapping"][: batch.num_rows]
    slots.copy_(slots // size + slots % size)


MUTANTS = (
    Mutant("M17", "Keeps old slots in padded rows", "sglang#24743", patch=frozen_rows("slot_mapping")),
    Mutant(
        "M16",
        "Keeps old lengths in padded requests",
        "sglang#10892",
        patch=frozen_rows("kv_lens"),
        layouts=("reference",),
        absent="no kv_lens; M16b keeps the last-page lengths instead",
    ),
    Mutant(
        "M16b",
        "Keeps old last-page lengths in padded requests",
        "sglang#10892",
        patch=frozen_rows("kv_last_page_len"),
        layouts=("csr",),
        absent="no last-page lengths; M16 keeps kv_lens instead",
    ),
    Mutant(
        "M19",
        "Writes -1 to the padded entries of an indptr",
        "vllm#19321",
        patch=edit(lambda b, x: b.arena["kv_indptr"][x.num_reqs + 1 : x.padded_reqs + 1].fill_(-1)),
        layouts=("csr",),
        absent="no indptr",
    ),
    Mutant(
        "M19b",
        "Writes the size of kv_indices to the padded entries of an indptr",
        "local-inference-lab/vllm#658",
        patch=edit(
            lambda b, x: b.arena["kv_indptr"][x.num_reqs + 1 : x.padded_reqs + 1].fill_(b.arena["kv_indices"].shape[0])
        ),
        layouts=("csr",),
        absent="no indptr",
    ),
    Mutant(
        "M19c",
        "Writes -1 to the lengths of padded requests",
        "vllm#21196",
        patch=edit(lambda b, x: b.arena["kv_lens"][x.num_reqs : x.padded_reqs].fill_(-1)),
        layouts=("reference",),
        absent="no kv_lens",
    ),
    Mutant(
        "M21b",
        "Overwrites page indices after an eighth of the buffer with -1",
        "sglang#11985",
        patch=edit(lambda b, x: b.arena["kv_indices"][b.arena["kv_indices"].shape[0] // 8 :].fill_(-1)),
        layouts=("csr",),
        absent=IN_PLACE,
    ),
    Mutant(
        "M27",
        "Assigns rows of a ragged batch to wrong requests",
        "sglang#32467",
        patch=edit(
            lambda b, x: (
                b.arena["slot_mapping"][: x.num_rows].copy_(b.arena["slot_mapping"][: x.num_rows].flip(0))
                if x.mode is Mode.EXTEND and x.padded_reqs > 1
                else None
            )
        ),
    ),
    Mutant("M29b", "Computes slots in 32 bits", "flashinfer#3136", patch=edit(_int32_slots)),
    Mutant(
        "M30",
        "Writes -1 to the slots of padded rows",
        "flashinfer#5176",
        patch=edit(lambda b, x: b.arena["slot_mapping"][sum(x.q_lens[: x.num_reqs]) : x.num_rows].fill_(-1)),
    ),
    Mutant("V30", "Copies from pageable memory in the captured region", "sglang#29415", patch=_pageable),
    Mutant("V37", "Writes after the end of a buffer", "sglang#27338", patch=_strays(torch.numel)),
    Mutant("V73", "Writes before the start of a buffer", "vllm#35969", patch=_strays(lambda buffer: -1)),
    Mutant("V43", "Mixes pages and tokens as units", "sglang#24587", patch=edit(_units)),
    Mutant(
        "V52",
        "Writes last-page length 0 instead of page_size",
        "sglang#15469",
        patch=edit(
            lambda b, x: b.arena["kv_last_page_len"][: x.padded_reqs].remainder_(b.geometry.attention.page_size)
        ),
        layouts=("csr",),
        absent="no last-page lengths",
    ),
    Mutant(
        "V53",
        "Keeps the mask of the previous tree for a causal tail",
        "flashinfer#1028",
        patch=lambda b: around(
            b, "_write_tail", lambda original, batch: original(batch) if hasattr(batch.tail, "mask") else None
        ),
        layouts=("csr",),
        absent=IN_PLACE,
    ),
    Mutant(
        "V54",
        "Writes the first page of each request twice",
        "sglang#38187",
        patch=edit(lambda b, x: b.arena["kv_indices"][1:2].copy_(b.arena["kv_indices"][:1])),
        layouts=("csr",),
        absent=IN_PLACE,
    ),
    Mutant("V58", "Keeps the metadata while mode and size are unchanged", "rtp-llm#1084", patch=_written_once),
)
