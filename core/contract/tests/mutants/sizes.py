"""Mutants of sizing: buffers that are too small, too large, or of the wrong dtype. Their checks run no kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, Geometry, Mode
from draftmark.geometry import ceil_div

from .mutant import Mutant, resized


def _pages(geometry: Geometry, tokens: Any) -> tuple[int, ...]:
    return (geometry.max_reqs * ceil_div(tokens, geometry.attention.page_size),)


def _rows_without_topk(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows = [geometry.max_rows(mode) // (geometry.draft.topk if mode is Mode.DRAFT else 1) for mode in geometry.modes]
    return (max(rows),)


def _rows_of_verify(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    others = [geometry.max_rows(mode) for mode in geometry.modes if mode is not Mode.VERIFY]
    return (max([*others, geometry.max_reqs]),)


def _twice(name: str) -> dict[str, Any]:
    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [*specs, *(replace(one, name="spare", shape=(one.numel * 3,)) for one in specs if one.name == name)]

    return {"buffers": change}


def _dtype(name: str, dtype: str) -> dict[str, Any]:
    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [replace(one, dtype=dtype) if one.name == name else one for one in specs]

    return {"buffers": change}


CSR = ("csr",)
IN_PLACE = "it reads the batch's page table and mask in place, and the core sizes those"

MUTANTS = (
    Mutant(
        "M01",
        "Leaves topk out of the row count of a draft step",
        "sglang#27338",
        resized("slot_mapping", _rows_without_topk),
    ),
    Mutant(
        "M02",
        "Sizes KV pages without the tail",
        "sglang#22778",
        resized("kv_indices", lambda g, s: _pages(g, g.max_prefix_len)),
        layouts=CSR,
        absent=IN_PLACE,
    ),
    Mutant(
        "M03",
        "Sizes KV pages from the context limit instead of the page table's width",
        "sglang#29665",
        resized("kv_indices", lambda g, s: _pages(g, g.limits.max_context_len + g.max_tail)),
        layouts=CSR,
        absent=IN_PLACE,
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
        absent=IN_PLACE,
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
    Mutant(
        "M25",
        "Multiplies the size of an index buffer by page_size",
        "tokenspeed#125",
        resized("kv_indices", lambda g, s: (s[0] * g.attention.page_size,)),
        layouts=CSR,
        absent="no page-indexed buffer; M25b enlarges the slot mapping",
    ),
    Mutant(
        "M25b",
        "Makes the slot mapping eight times too large",
        "aiter#3855",
        resized("slot_mapping", lambda g, s: (s[0] * 8,)),
    ),
    Mutant("M25c", "Declares a buffer that no step reads", "sglang#31527", _twice("slot_mapping")),
    Mutant("M29", "Stores slots in 32 bits", "vllm#47671", _dtype("slot_mapping", "int32")),
    Mutant("V60", "Stores slots in 16 bits", "sglang#27840", _dtype("slot_mapping", "int16")),
    Mutant(
        "V61",
        "Sizes the mask with one word for tails of any length",
        "TRT-LLM#13006",
        {**resized("tail_mask", lambda g, s: (s[0], 1))},
        layouts=CSR,
        absent=IN_PLACE,
    ),
)
