"""Mutants that checks of `metadata` kill: large."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import Mode, ceil_div
from draftmark.runtime import ForwardBatch

from ...designs.changes import edit, on_indptr, on_prefix, on_table, placed, slot_of
from ...designs.layouts import of_tutorial
from ...designs.tutorial import Backend
from ...designs.tutorial_parts import opens
from ...mutant import Mutant


def _int32_slots(backend: Any, batch: ForwardBatch) -> None:
    slots = backend.arena["slot_mapping"][: batch.num_rows]
    slots.copy_(slots.to(torch.int32))


class MagicDivision(Backend):
    """Computes position // P as (position · ceil(2**20 / P)) >> 20: wrong at long contexts unless P is a power of 2."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        size = self.shape.page_size
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, rows, right=True) - 1
        tail = batch.tail_lens[0] if batch.uniform else batch.q_indptr.diff()
        position = ((batch.prefix_lens + tail)[request] - (batch.q_indptr[request + 1] - rows)).long()
        column = (position * ceil_div(2**20, size)) >> 20
        page = batch.page_table[request, column].long()
        self.slots[: batch.num_rows] = page * size + (position - column * size).clamp(min=0)


def _even(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    """Compute row offsets as if all requests had the same number of rows."""
    each = max(1, batch.num_rows // batch.padded_reqs)
    return (torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * each).clamp(max=batch.num_rows)


def _narrow(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    """Clamp page columns after the context limit to the last column before it."""
    a = backend.geometry.attention
    last = -(-backend.geometry.limits.max_context_len // a.page_size) - 1
    return batch.page_table[:, torch.arange(batch.page_table.shape[1]).clamp(max=last)]


def _small_ids(limit: int) -> Any:
    """Compute request numbers modulo `limit`."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return slot_of(backend, batch, request % limit, position)

    return change


def _small_pages(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    size = backend.geometry.attention.page_size
    return batch.page_table[request, position // size % 256].long() * size + position % size


def _wrap(dtype: torch.dtype) -> Any:
    return on_prefix(lambda b, x: x.prefix_lens.to(dtype).to(torch.int32))


MUTANTS = (
    Mutant(
        "M11", "Computes row offsets of a ragged prefill as if it were uniform", "sglang#21987", patch=on_indptr(_even)
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
    of_tutorial(
        "S09",
        "Computes the page of a position by a 20-bit multiplier instead of a division",
        "page sizes of hybrid models (vLLM's 544, 784, 1056) are no powers of two; wrong from about 2500 tokens on",
        opens(MagicDivision),
    ),
    Mutant(
        "V05",
        "Ignores the prefix in EXTEND",
        "vllm#53658",
        patch=on_prefix(lambda b, x: torch.zeros_like(x.prefix_lens), Mode.EXTEND),
    ),
    Mutant("V20", "Reads the page table only up to the context limit", "sglang#35985", patch=on_table(_narrow)),
    Mutant(
        "V23",
        "Truncates page ids to 16 bits",
        "sglang#27840",
        patch=on_table(lambda b, x: x.page_table.to(torch.int16).to(torch.int32)),
    ),
    Mutant("X25", "Truncates request numbers to 7 bits", "vllm#47671", patch=placed(_small_ids(128))),
    Mutant("X26", "Truncates request numbers to 8 bits", "vllm#47671", patch=placed(_small_ids(256))),
    Mutant("X27", "Truncates page columns to 8 bits", "vllm#47671", patch=placed(_small_pages)),
    Mutant("X29", "Truncates lengths to 16 bits", "vllm#47671", patch=_wrap(torch.int16)),
    Mutant("X30", "Rounds lengths to bfloat16", "vllm#34043", patch=_wrap(torch.bfloat16)),
    Mutant("X31", "Rounds lengths to float16", "vllm#34043", patch=_wrap(torch.float16)),
)  # fmt: skip
KILLER = dict.fromkeys(("S09",), "metadata.survives_large_counts")
