"""Mutants that checks of `metadata` kill: buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode, ceil_div
from draftmark.runtime import ForwardBatch
from draftmark_contract.layouts import Layout, LengthConvention

from ...designs.changes import edit, pages_for
from ...designs.declared import levels
from ...designs.layouts import CSR, IN_PLACE, NO_INDPTR, SIZED_BY_CORE
from ...mutant import Mutant, around, on_batch, resized


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


def _units(backend: Any, batch: ForwardBatch) -> None:
    size = backend.geometry.attention.page_size
    slots = backend.arena["slot_mapping"][: batch.num_rows]
    slots.copy_(slots // size + slots % size)


def _contiguous_by_ends(backend: Any) -> None:
    """Take a request's pages for contiguous when its last id minus its first is their number minus one."""

    def write(original: Any, batch: ForwardBatch, indptr: torch.Tensor) -> None:
        table, count = batch.page_table, indptr.diff().clamp(min=1)
        last = table.gather(1, (count[:, None] - 1).long())
        run = table[:, :1] + torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        together = last - table[:, :1] == count[:, None] - 1
        original(replace(batch, page_table=torch.where(together, run, table)), indptr)

    around(backend, "_write_indices", write)


def _bound_as_exact(backend: Any) -> None:
    """Use the host's upper bound as the exact prefix length."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        lens = torch.zeros_like(batch.prefix_lens)
        for n, bound in enumerate(batch.host.upper_bound()):
            lens[n] = bound
        return replace(batch, prefix_lens=lens)

    on_batch(see, "write_metadata")(backend)


def _needs_exact(backend: Any) -> None:
    def call(original: Any, batch: ForwardBatch) -> None:
        batch.host.lens  # noqa: B018 - raises for Unknown lengths
        original(batch)

    around(backend, "plan", call)


def _rows_of_verify(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    others = [geometry.max_rows(mode) for mode in geometry.modes if mode is not Mode.VERIFY]
    return (max([*others, geometry.max_reqs]),)


MUTANTS = (
    Mutant(
        "M02",
        "Sizes KV pages without the tail",
        "sglang#22778",
        resized("kv_indices", lambda g, s: pages_for(g, g.max_prefix_len)),
        layouts=CSR,
        absent=SIZED_BY_CORE,
    ),
    Mutant(
        "M04",
        "Sizes a per-token buffer in pages",
        "sglang#24587",
        resized("slot_mapping", lambda g, s: (ceil_div(s[0], g.attention.page_size),)),
    ),
    Mutant(
        "M05",
        "Sizes the verify mask without the rows of the draft tokens",
        "sglang#29450",
        resized("tail_mask", lambda g, s: (g.max_reqs, s[1])),
        layouts=CSR,
        absent=SIZED_BY_CORE,
    ),
    Mutant(
        "M05b",
        "Leaves the draft tokens out of the verify rows",
        "sglang#38746",
        resized("slot_mapping", _rows_of_verify),
    ),
    Mutant(
        "M06",
        "Sizes a per-request buffer by max_num_reqs instead of the largest captured size",
        "sglang#25124",
        resized("kv_lens", lambda g, s: (g.limits.max_num_reqs,)),
        layouts=("reference",),
        absent="no kv_lens; M06b shrinks kv_indptr instead",
    ),
    Mutant(
        "M06b",
        "Sizes an indptr by max_num_reqs + 1",
        "sglang#25124",
        resized("kv_indptr", lambda g, s: (g.limits.max_num_reqs + 1,)),
        layouts=CSR,
        absent="no indptr",
    ),
    Mutant(
        "M06c",
        "Sizes an indptr without its last entry",
        "dlinfer#148",
        resized("qo_indptr", lambda g, s: (s[0] - 1,)),
        layouts=CSR,
        absent="no indptr",
    ),
    Mutant("M07", "Uses the host's upper bound as the length", "sglang#26753", patch=_bound_as_exact),
    Mutant("M08", "Raises when host lengths are unknown", "sglang#26738", patch=_needs_exact),
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
    Mutant("M17", "Keeps old slots in padded rows", "sglang#24743", patch=frozen_rows("slot_mapping")),
    Mutant(
        "M18",
        "Declares padded length 1 and writes 0",
        "vllm#38436",
        {"layouts": lambda g, found: {mode: replace(one, pad_fill=1) for mode, one in found.items()}},
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
        "M30",
        "Writes -1 to the slots of padded rows",
        "flashinfer#5176",
        patch=edit(lambda b, x: b.arena["slot_mapping"][sum(x.q_lens[: x.num_reqs]) : x.num_rows].fill_(-1)),
    ),
    Mutant("OG4", "Finds contiguous pages by the first and the last id", "flashinfer#3219",
           patch=_contiguous_by_ends, layouts=("csr",), absent="tried in csr"),
    Mutant("V37", "Writes after the end of a buffer", "sglang#27338", patch=_strays(torch.numel)),
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
        "V54",
        "Writes the first page of each request twice",
        "sglang#38187",
        patch=edit(lambda b, x: b.arena["kv_indices"][1:2].copy_(b.arena["kv_indices"][:1])),
        layouts=("csr",),
        absent=IN_PLACE,
    ),
    Mutant(
        "V61",
        "Sizes the mask with one word for tails of any length",
        "TRT-LLM#13006",
        {**resized("tail_mask", lambda g, s: (s[0], 1))},
        layouts=CSR,
        absent=SIZED_BY_CORE,
    ),
    Mutant("V73", "Writes before the start of a buffer", "vllm#35969", patch=_strays(lambda buffer: -1)),
    Mutant("W03", "Sizes pages too small if both topk and page_size exceed 1", "sglang#24587",
           resized("kv_indices", lambda g, s: (s[0] - g.max_reqs,)
                   if g.draft.topk > 1 and g.attention.page_size > 1 else s), layouts=CSR, absent=SIZED_BY_CORE),
    Mutant("W06", "Sizes rows by max_extend_tokens whenever EXTEND is served", "sglang#27338",
           resized("slot_mapping", lambda g, s: (g.limits.max_extend_tokens,) if Mode.EXTEND in g.modes else s)),
    Mutant("W07", "Sizes the depths by num_draft_tokens", "sglang#27338",
           resized("tail_depth", lambda g, s: (s[0], g.draft.num_draft_tokens)), layouts=CSR, absent=SIZED_BY_CORE),
    Mutant("W09", "Sizes last-page lengths by max_num_reqs", "sglang#25124",
           resized("kv_last_page_len", lambda g, s: (g.limits.max_num_reqs,)), layouts=CSR, absent=NO_INDPTR),
    Mutant("W10", "Rounds pages up once for all requests together", "sglang#22778",
           resized("kv_indices", lambda g, s: (ceil_div(g.max_reqs * g.max_kv_len, g.attention.page_size),)),
           layouts=CSR, absent=SIZED_BY_CORE),
    Mutant("W44", "Declares prefix lengths and writes prefix plus tail", "sglang#26512",
           levels(lengths=LengthConvention.PREFIX)),
    Mutant("W45b", "Declares that an existing level does not exist", "sglang#24587", levels(layout=Layout.NONE)),
    Mutant("W47", "Declares that no mask applies", "sglang#32920", levels(masked=False)),
)  # fmt: skip
KILLER = dict.fromkeys(("OG4",), "metadata.decodes_to_the_token_history")
