"""Mutants that the checks of `overflow` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, Geometry
from draftmark_contract.layouts import Layout

from ..designs.declared import levels
from ..designs.layouts import CSR, NO_INDPTR
from ..mutant import Mutant


def _narrow_if(name: str, dtype: str, condition: Callable[[Geometry], Any]) -> dict[str, Any]:
    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [replace(one, dtype=dtype) if one.name == name and condition(geometry) else one for one in specs]

    return {"buffers": change}


def _dtype(name: str, dtype: str) -> dict[str, Any]:
    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [replace(one, dtype=dtype) if one.name == name else one for one in specs]

    return {"buffers": change}


MUTANTS = (
    Mutant("M29", "Stores slots in 32 bits", "vllm#47671", _dtype("slot_mapping", "int32")),
    Mutant("V60", "Stores slots in 16 bits", "sglang#27840", _dtype("slot_mapping", "int16")),
    Mutant("W14", "Stores slots in 32 bits for large pages", "vllm#47671",
           _narrow_if("slot_mapping", "int32", lambda g: g.attention.page_size > 64)),
    Mutant("W15", "Stores lengths in 16 bits", "vllm#47671", _narrow_if("kv_lens", "int16", lambda g: True),
           layouts=("reference",), absent="no kv_lens; W15b changes kv_indptr"),
    Mutant("W15b", "Stores an indptr in 16 bits", "vllm#47671", _narrow_if("kv_indptr", "int16", lambda g: True),
           layouts=CSR, absent=NO_INDPTR),
    Mutant("W45", "Declares token slots and writes pages", "sglang#24587", levels(layout=Layout.CSR_TOKENS),
           layouts=("csr",), absent="no CSR; W45b declares an absent level"),
)  # fmt: skip
