"""Mutants of buffer sizes that fail only in rare configurations or in own workspaces. Their checks run no kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, Geometry, Mode, Role, Unit
from draftmark.geometry import ceil_div, maximum, minimum

from .mutant import Mutant, resized

Shape = tuple[int, ...]
CSR = ("csr",)
IN_PLACE = "it reads the batch's page table and mask in place, and the core sizes those"
NO_INDPTR = "no indptr"


def _short_if(condition: Callable[[Geometry], Any], by: int = 1) -> Callable[[Geometry, Shape], Shape]:
    """Return a shape function that makes a buffer `by` rows too short in geometries that meet the condition."""
    return lambda g, s: (s[0] - by, *s[1:]) if condition(g) else s


def _uncaptured(geometry: Geometry, shape: Shape) -> Shape:
    live = replace(geometry, limits=replace(geometry.limits, capture_batch_sizes=()))
    return (live.max_rows_any,) if live.max_reqs < geometry.max_reqs else shape


def _few_draft_tokens(geometry: Geometry, shape: Shape) -> Shape:
    d = geometry.draft
    tail = maximum(1, minimum(d.num_draft_tokens, d.num_steps + 1), d.topk * (d.num_steps - 1))
    return (geometry.max_reqs * ceil_div(geometry.max_prefix_len + tail, geometry.attention.page_size),)


def _captured(extra: int) -> Callable[[Geometry, Shape], Shape]:
    """Return a shape function that sizes a buffer for the largest captured batch, although eager ones are larger."""
    return lambda g, s: (maximum(*(g.limits.capture_batch_sizes or (g.limits.max_num_reqs,))) + extra,)


def _narrow_if(name: str, dtype: str, condition: Callable[[Geometry], Any]) -> dict[str, Any]:
    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [replace(one, dtype=dtype) if one.name == name and condition(geometry) else one for one in specs]

    return {"buffers": change}


def _spare(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    return [*specs, *(replace(one, name="spare") for one in specs if one.name == "slot_mapping")]


def own(
    entries: Callable[[Geometry], Any], used: Callable[[Geometry, Any], Any], name: str = "scratch"
) -> dict[str, Callable[..., Any]]:
    """Return hooks of a backend with a workspace of `entries` bytes, and with `used` as its usage in a batch."""

    def buffers(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [*specs, BufferSpec("scratch", Role.WORKSPACE, (entries(geometry),), "uint8", Unit.BYTES, "a query")]

    def usage(geometry: Geometry, found: dict[str, int], batch: Any) -> dict[str, int]:
        return {**found, name: used(geometry, batch)}

    return {"buffers": buffers, "usage": usage}


def _full(geometry: Geometry) -> Any:
    return 16 * geometry.max_rows_any * geometry.device.num_sms


def _needs(geometry: Geometry, batch: Any) -> int:
    return 16 * batch.num_rows * geometry.device.num_sms


RIGHT = own(_full, _needs)
"""Hooks of a correct workspace; the mutants below change it."""

MUTANTS = (
    Mutant("W01", "Sizes the slot mapping one row too small with overlap", "sglang#22778",
           resized("slot_mapping", _short_if(lambda g: g.limits.overlap))),
    Mutant("W02", "Sizes rows by max_num_reqs when a captured size exceeds it", "sglang#25124",
           resized("slot_mapping", _uncaptured)),
    Mutant("W03", "Sizes pages too small if both topk and page_size exceed 1", "sglang#24587",
           resized("kv_indices", lambda g, s: (s[0] - g.max_reqs,)
                   if g.draft.topk > 1 and g.attention.page_size > 1 else s), layouts=CSR, absent=IN_PLACE),
    Mutant("W04", "Counts at most num_steps + 1 draft tokens", "sglang#27545",
           resized("kv_indices", _few_draft_tokens), layouts=CSR, absent=IN_PLACE),
    Mutant("W05", "Sizes the slot mapping one row too small for an odd number of KV heads", "sglang#24587",
           resized("slot_mapping", _short_if(lambda g: g.attention.num_kv_heads % 2 and g.attention.num_kv_heads > 1))),
    Mutant("W06", "Sizes rows by max_extend_tokens whenever EXTEND is served", "sglang#27338",
           resized("slot_mapping", lambda g, s: (g.limits.max_extend_tokens,) if Mode.EXTEND in g.modes else s)),
    Mutant("W07", "Sizes the depths by num_draft_tokens", "sglang#27338",
           resized("tail_depth", lambda g, s: (s[0], g.draft.num_draft_tokens)), layouts=CSR, absent=IN_PLACE),
    Mutant("W08", "Sizes the mask with at most two words", "TRT-LLM#13006",
           resized("tail_mask", lambda g, s: (s[0], minimum(s[1], 2))), layouts=CSR, absent=IN_PLACE),
    Mutant("W09", "Sizes last-page lengths by max_num_reqs", "sglang#25124",
           resized("kv_last_page_len", lambda g, s: (g.limits.max_num_reqs,)), layouts=CSR, absent=NO_INDPTR),
    Mutant("W10", "Rounds pages up once for all requests together", "sglang#22778",
           resized("kv_indices", lambda g, s: (ceil_div(g.max_reqs * g.max_kv_len, g.attention.page_size),)),
           layouts=CSR, absent=IN_PLACE),
    Mutant("W11", "Sizes lengths by the largest captured size only", "vllm#50065",
           resized("kv_lens", _captured(0)), layouts=("reference",), absent="no kv_lens; W11b changes kv_indptr"),
    Mutant("W11b", "Sizes an indptr by the largest captured size only", "vllm#50065",
           resized("kv_indptr", _captured(1)), layouts=CSR, absent=NO_INDPTR),
    Mutant("W12", "Doubles the number of pages with overlap", "aiter#3855",
           resized("kv_indices", lambda g, s: (s[0] * 2,) if g.limits.overlap else s), layouts=CSR, absent=IN_PLACE),
    Mutant("W12b", "Doubles the number of rows for pages of one token", "tokenspeed#125",
           resized("slot_mapping", lambda g, s: (s[0] * 2,) if g.attention.page_size == 1 else s)),
    Mutant("W13", "Multiplies the VERIFY rows by topk", "aiter#3855",
           resized("slot_mapping", lambda g, s: (maximum(*s, g.max_reqs * g.draft.topk * g.draft.num_draft_tokens),))),
    Mutant("W14", "Stores slots in 32 bits for large pages", "vllm#47671",
           _narrow_if("slot_mapping", "int32", lambda g: g.attention.page_size > 64)),
    Mutant("W15", "Stores lengths in 16 bits", "vllm#47671", _narrow_if("kv_lens", "int16", lambda g: True),
           layouts=("reference",), absent="no kv_lens; W15b changes kv_indptr"),
    Mutant("W15b", "Stores an indptr in 16 bits", "vllm#47671", _narrow_if("kv_indptr", "int16", lambda g: True),
           layouts=CSR, absent=NO_INDPTR),
    Mutant("W16", "Sizes the slot mapping one row too small on devices with more than 132 SMs", "TRT-LLM#16319",
           resized("slot_mapping", _short_if(lambda g: g.device.num_sms > 132))),
    Mutant("W16b", "Sizes the slot mapping one row too small on newer architectures", "pie#414",
           {**resized("slot_mapping", _short_if(lambda g: g.device.arch > 100)),
            "describe": lambda _, info: replace(info, device="cuda")}),
    Mutant("W17", "Sizes the slot mapping one row too small for groups of 5 or 7 heads", "sglang#24587",
           resized("slot_mapping", _short_if(lambda g: g.attention.group_size in (5, 7)))),
    Mutant("W18", "Sizes the slot mapping one row too small with a window and topk above 2", "sglang#29450",
           resized("slot_mapping", _short_if(lambda g: g.attention.window_left >= 0 and g.draft.topk > 2))),
    Mutant("W19", "Declares a second slot mapping that no step writes", "sglang#31527", {"buffers": _spare}),
    Mutant("W20", "Sizes the workspace for 132 SMs", "pie#414", own(lambda g: 16 * 132 * g.max_rows_any, _needs)),
    Mutant("W21", "Sizes the workspace three times too large", "flashinfer#2046", own(lambda g: 3 * _full(g), _needs)),
    Mutant("W22", "Leaves the workspace out of usage", "TRT-LLM#17026",
           {**RIGHT, "usage": lambda g, found, batch: found}),
    Mutant("W23", "Returns usage in elements instead of bytes",
           "TRT-LLM#17026", own(_full, lambda g, x: _needs(g, x) // 4)),
    Mutant("W24", "Returns the usage of an index buffer", "TRT-LLM#17026", own(_full, _needs, "slot_mapping")),
    Mutant("W25", "Reads device lengths in usage", "sglang#29413",
           own(_full, lambda g, x: _needs(g, x) + 0 * int(x.prefix_lens.max()))),
    Mutant("W26", "Returns 0 from usage", "TRT-LLM#17026", own(_full, lambda g, x: 0)),
    Mutant("W27", "Sizes the workspace by max_num_reqs", "sglang#25124",
           own(lambda g: 16 * g.device.num_sms * maximum(g.limits.max_num_reqs, g.limits.max_extend_tokens), _needs)),
    Mutant("W28", "Needs more workspace for three requests than for the largest batch", "TRT-LLM#16319",
           own(_full, lambda g, x: _needs(g, x) if x.padded_reqs != 3 else 2 * _full(g))),
    Mutant("W29", "Sizes the workspace by a constant", "pie#414", own(lambda g: 1 << 16, _needs)),
)  # fmt: skip
