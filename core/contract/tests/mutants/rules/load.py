"""Mutants that the checks of `load` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, Geometry

from ..designs.declared import CALLS, Declared
from ..mutant import Mutant

_SHARED: dict[str, Any] = {}


def _declares(**fields: Any) -> dict[str, Any]:
    return {"layouts": lambda g, found: {mode: replace(one, **fields) for mode, one in found.items()}}


def _unnamed(role: str) -> dict[str, Any]:
    """Return a `layouts` hook that removes the buffer of one role from every attention pass."""

    def change(geometry: Geometry, found: Declared) -> Declared:
        return {
            mode: replace(
                spec,
                levels=tuple(
                    replace(one, buffers={k: v for k, v in one.buffers.items() if k != role}) for one in spec.levels
                ),
            )
            for mode, spec in found.items()
        }

    return {"layouts": change}


def _misnamed(geometry: Geometry, found: Declared) -> Declared:
    return {
        mode: replace(
            s, levels=tuple(replace(x, buffers={**x.buffers, "mask_indptr": "slot_mapping"}) for x in s.levels)
        )
        for mode, s in found.items()
    }


def _prints(geometry: Geometry, found: Any) -> Any:
    print("loading kernels")
    return found


def _one_list(geometry: Geometry, found: list[Any]) -> list[Any]:
    return _SHARED.setdefault(repr(geometry), found)  # type: ignore[no-any-return]


def _grows(geometry: Geometry, specs: list[Any]) -> list[Any]:
    return [replace(one, formula=f"{one.formula} (call {next(CALLS)})") for one in specs]


def _described(**fields: Any) -> dict[str, Any]:
    def change(_: None, info: Any) -> Any:
        return replace(info, **{name: one() if callable(one) else one for name, one in fields.items()})

    return {"describe": change}


def _spare(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    return [*specs, *(replace(one, name="spare") for one in specs if one.name == "slot_mapping")]


def _twice(name: str) -> dict[str, Any]:
    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [*specs, *(replace(one, name="spare", shape=(one.numel * 3,)) for one in specs if one.name == name)]

    return {"buffers": change}


MUTANTS = (
    Mutant("M25c", "Declares a buffer that no step reads", "sglang#31527", _twice("slot_mapping")),
    Mutant("W19", "Declares a second slot mapping that no step writes", "sglang#31527", {"buffers": _spare}),
    Mutant("W37", "Prints in supports", "sglang#32920", {"supports": _prints}),
    Mutant("W38", "Returns one shared list from buffers on every call", "sglang#31198", {"buffers": _one_list}),
    Mutant("W39", "Returns buffers that depend on the number of calls", "sglang#31198", {"buffers": _grows}),
    Mutant("W40", "Declares a mask stride of -1", "sglang#31367", _declares(mask_stride=-1)),
    Mutant("W41", "Declares a mask stride that differs from the mask's stride", "TRT-LLM#13006",
           {"layouts": lambda g, found: {m: replace(s, mask_stride=g.mask_words + 1) for m, s in found.items()}}),
    Mutant("W42", "Declares a wrong mask dtype", "TRT-LLM#13006", _declares(mask_dtype="uint8")),
    Mutant("W43", "Declares a buffer under a wrong role", "vllm#17394", {"layouts": _misnamed}),
    Mutant("W46", "Declares no level with the slot mapping", "vllm#17394", _unnamed("slot_mapping")),
    Mutant("W48", "Targets a contract version that does not exist yet", "vllm#57566", _described(contract_minor=99)),
    Mutant("W48b", "Targets a contract version before the first", "vllm#57566", _described(contract_minor=-1)),
    Mutant("W49", "Declares a runtime module with an empty name", "vllm#57566", _described(runtime=("torch", ""))),
    Mutant("W49b", "Describes itself differently on each call",
           "vllm#57566", _described(summary=lambda: str(next(CALLS)))),
    Mutant("W50", "Declares a buffer without a formula", "vllm#17394",
           {"buffers": lambda g, specs: [replace(one, formula="") for one in specs]}),
    Mutant("W52", "Returns None from supports instead of a list", "sglang#32920", {"supports": lambda g, found: None}),
    Mutant("W53", "Declares pad_fill 2", "vllm#38436", _declares(pad_fill=2)),
    Mutant("W54", "Declares an unknown live_extent", "vllm#38436", _declares(live_extent="all")),
)  # fmt: skip
