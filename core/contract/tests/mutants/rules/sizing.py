"""Mutants that the checks of `sizing` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from draftmark import BufferSpec, Geometry, Mode, ceil_div, maximum, minimum
from draftmark.runtime import ForwardBatch, KVCache

from ..designs.layouts import CSR, NO_INDPTR, SIZED_BY_CORE, of_tutorial
from ..designs.tutorial import Plugin
from ..designs.tutorial_parts import TutorialParts, opens
from ..designs.workspaces import Shape, full, needs, own, short_if
from ..mutant import Mutant, resized


def splits_of(geometry: Geometry, requests: int) -> int:
    """Return the number of KV splits of a decode batch that gives every SM a block."""
    return maximum(1, geometry.device.num_sms // (requests * geometry.attention.num_kv_heads))


class FewerSplitMore(Plugin):
    """Sizes partial outputs for the largest batch, although 64 requests of 2 splits need more than 100 of 1 split."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        a = geometry.attention
        parts = geometry.max_reqs * splits_of(geometry, geometry.max_reqs)
        shape = parts, a.num_qo_heads, a.head_dim
        spec = BufferSpec("partials", shape, "float32", "max_reqs · splits(max_reqs)")
        return [*super().buffers(geometry), spec]


def partials_used(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of a decode batch's partial outputs: one per request, split and query head."""
    a, decodes = geometry.attention, batch.mode is Mode.DECODE
    parts = batch.padded_reqs * splits_of(geometry, batch.padded_reqs) if decodes else 0
    return {"partials": parts * a.num_qo_heads * a.head_dim * 4}


class SplitDecode(TutorialParts):
    """Decodes with split-KV partial outputs. A slice stops at the buffer's end, where a kernel would write beyond."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        super().attend(q, cache, batch, out)
        if batch.mode is Mode.DECODE:
            requests = batch.padded_reqs
            splits = splits_of(self.geometry, requests)
            parts = self.arena["partials"][: requests * splits].view(requests, splits, *out.shape[1:])
            parts.copy_(out[:, None])
            out.copy_(parts[:, 0])


def _short_slots(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Size the slots for D rows of a request in DRAFT_EXTEND."""
    extra = geometry.draft.num_modules - 1 if Mode.DRAFT_EXTEND in geometry.modes else 0
    return (shape[0] - geometry.max_reqs * extra,)


def _short_with_both(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    both = {Mode.VERIFY, Mode.DRAFT} <= set(geometry.modes)
    return (geometry.max_reqs * geometry.draft.topk,) if both else shape


def _few_draft_tokens(geometry: Geometry, shape: Shape) -> Shape:
    d = geometry.draft
    tail = maximum(1, minimum(d.num_draft_tokens, d.num_steps + 1), d.topk * (d.num_steps - 1))
    return (geometry.max_reqs * ceil_div(geometry.max_prefix_len + tail, geometry.attention.page_size),)


def _captured(extra: int) -> Callable[[Geometry, Shape], Shape]:
    """Return a shape function that sizes a buffer for the largest captured batch, although eager ones are larger."""
    return lambda g, s: (maximum(*(g.limits.capture_batch_sizes or (g.limits.max_num_reqs,))) + extra,)


def _rows_without_topk(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows = [geometry.max_rows(mode) // (geometry.draft.topk if mode is Mode.DRAFT else 1) for mode in geometry.modes]
    return (max(rows),)


MUTANTS = (
    Mutant("D10", "Sizes slots for D rows of a request with several modules", "a second copy of the rows' formula",
           hooks=resized("slot_mapping", _short_slots)),
    Mutant(
        "M01",
        "Leaves topk out of the row count of a draft step",
        "sglang#27338",
        resized("slot_mapping", _rows_without_topk),
    ),
    Mutant("R21", "Sizes the slot mapping too small for a geometry with VERIFY and DRAFT", "–",
           hooks=resized("slot_mapping", _short_with_both)),
    of_tutorial(
        "S22",
        "Sizes the partial outputs of split decode by the largest batch",
        "num_kv_splits by SM count: capture sizes 64 and 100 on 132 SMs with one KV head (TP 8)",
        opens(SplitDecode, FewerSplitMore),
        usage=partials_used,
    ),
    Mutant("W04", "Counts at most num_steps + 1 draft tokens", "sglang#27545",
           resized("kv_indices", _few_draft_tokens), layouts=CSR, absent=SIZED_BY_CORE),
    Mutant("W05", "Sizes the slot mapping one row too small for an odd number of KV heads", "sglang#24587",
           resized("slot_mapping", short_if(lambda g: g.attention.num_kv_heads % 2 and g.attention.num_kv_heads > 1))),
    Mutant("W08", "Sizes the mask with at most two words", "TRT-LLM#13006",
           resized("tail_mask", lambda g, s: (s[0], minimum(s[1], 2))), layouts=CSR, absent=SIZED_BY_CORE),
    Mutant("W11", "Sizes lengths by the largest captured size only", "vllm#50065",
           resized("kv_lens", _captured(0)), layouts=("reference",), absent="no kv_lens; W11b changes kv_indptr"),
    Mutant("W11b", "Sizes an indptr by the largest captured size only", "vllm#50065",
           resized("kv_indptr", _captured(1)), layouts=CSR, absent=NO_INDPTR),
    Mutant("W16", "Sizes the slot mapping one row too small on devices with more than 132 SMs", "TRT-LLM#16319",
           resized("slot_mapping", short_if(lambda g: g.device.num_sms > 132))),
    Mutant("W16b", "Sizes the slot mapping one row too small on newer architectures", "pie#414",
           {**resized("slot_mapping", short_if(lambda g: g.device.arch > 100)),
            "describe": lambda _, info: replace(info, device="cuda")}),
    Mutant("W17", "Sizes the slot mapping one row too small for groups of 5 or 7 heads", "sglang#24587",
           resized("slot_mapping", short_if(lambda g: g.attention.group_size in (5, 7)))),
    Mutant("W27", "Sizes the workspace by max_num_reqs", "sglang#25124",
           own(lambda g: 16 * g.device.num_sms * maximum(g.limits.max_num_reqs, g.limits.max_extend_tokens), needs)),
    Mutant("W28", "Needs more workspace for three requests than for the largest batch", "TRT-LLM#16319",
           own(full, lambda g, x: needs(g, x) if x.padded_reqs != 3 else 2 * full(g))),
    Mutant("W29", "Sizes the workspace by a constant", "pie#414", own(lambda g: 1 << 16, needs)),
)  # fmt: skip
KILLER = {
    "R21": "sizing.covers",
    "S22": "sizing.covers_processors",
}
