"""Mutants that the checks of `guards` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Geometry, Mode
from draftmark.runtime import ForwardBatch, KVCache, UpperBound

from ..designs.changes import key_lost, on_host_lengths
from ..designs.layouts import IN_PLACE
from ..designs.plain_attention import Parts, attending
from ..designs.workspaces import Shape, short_if
from ..mutant import Mutant, after, around, on_batch, resized


def _with_window(change: Callable[[ForwardBatch, int], int]) -> Callable[[Any], None]:
    """Return a patch that attends with another window when the geometry has a window."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
            right = backend.geometry
            left = right.attention.window_left
            if left >= 0:
                wrong = replace(right.attention, window_left=change(batch, left))
                backend.geometry = replace(right, attention=wrong)
            original(q, cache, batch, out)
            backend.geometry = right

        around(backend, "attend", call)

    return patch


def _eight_requests(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
    out[sum(batch.q_lens[:8]) :] = 0


def _keys_below(limit: int) -> Parts:
    return Parts(seen=lambda seen, prefix, shape: seen & (torch.arange(seen.shape[2]) < limit))


def _sixteen_heads(shape: Any) -> Tensor:
    head = torch.arange(shape.num_qo_heads)
    return torch.where(head < 16, head // shape.group_size, 0)


def _stale_padding(backend: Any) -> None:
    """Give padded requests the page-table rows of the previous batch of that size."""
    kept: dict[int, Tensor] = {}

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        table, live = batch.page_table.clone(), batch.num_reqs
        old = kept.get(batch.padded_reqs)
        if old is not None:
            table[live:] = old[live:]
        kept[batch.padded_reqs] = batch.page_table.clone()
        return replace(batch, page_table=table)

    on_batch(change, "write_metadata")(backend)


_COMMON: dict[str, torch.Tensor] = {}


def _first_size(backend: Any) -> None:
    """Write metadata only for the number of requests of a mode's first batch."""
    seen: dict[Mode, int] = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        size = seen.setdefault(batch.mode, batch.padded_reqs)
        kept = {name: backend.arena[name].clone() for name in backend.arena}
        original(batch)
        if batch.padded_reqs > size:
            rows = sum(batch.q_lens[:size])
            backend.arena["slot_mapping"][rows:] = kept["slot_mapping"][rows:]

    around(backend, "write_metadata", call)


def _shared(geometry: Any, backend: Any) -> Any:
    """Use one slot mapping for all geometries."""
    own = backend.arena["slot_mapping"]
    device = str(own.device)
    if device not in _COMMON:
        _COMMON[device] = torch.empty(1 << 16, dtype=torch.int64, device=own.device)
    view = backend.arena._tensors["slot_mapping"] = _COMMON[device][: own.numel()]
    if hasattr(backend, "_slots"):
        backend._slots = view
    return backend


def _uncaptured(geometry: Geometry, shape: Shape) -> Shape:
    live = replace(geometry, limits=replace(geometry.limits, capture_batch_sizes=()))
    return (live.max_rows_any,) if live.max_reqs < geometry.max_reqs else shape


_GLOBAL: dict[str, Any] = {}


def _global_plan(backend: Any) -> None:
    """Keep the plan in a module-level variable that all backends share."""

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        backend._widths = _GLOBAL["widths"]
        original(q, cache, batch, out)

    after(backend, "plan", lambda batch: _GLOBAL.update(widths=backend._widths))
    around(backend, "attend", call)


def _context_bound(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    wall = backend.geometry.limits.max_context_len
    return replace(batch, host=UpperBound(tuple(min(n, wall) for n in batch.host.upper_bound())))


def _warm_shape(backend: Any) -> None:
    """Zero all output rows beyond the number of live rows that the first batch of this mode and size had."""
    first: dict[Any, int] = {}

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        rows = first.setdefault((batch.mode, batch.padded_reqs), sum(batch.q_lens[: max(1, batch.num_reqs)]))
        original(q, cache, batch, out)
        if batch.uniform:
            out[rows:] = 0

    around(backend, "attend", call)


MUTANTS = (
    Mutant("M10", "Keeps the slice of the first batch's size", "sglang#26655", patch=_first_size),
    Mutant("M26", "Shares a buffer between target and draft", "vllm#48261", {"open_backend": _shared}),
    Mutant("M34", "Stores padded requests on the pages of the previous batch", "vllm#56734", patch=_stale_padding),
    Mutant("R01", "Leaves the output of requests after the eighth at zero", "llm-scaler#368",
           patch=lambda b: after(b, "attend", _eight_requests)),
    Mutant("R02", "Ignores keys from the 1024th on", "llm-scaler#368", patch=attending(_keys_below(1024))),
    Mutant("R03", "Loses the last key before a split at 512 keys", "–", patch=attending(key_lost(512))),
    Mutant("R06", "Lets query heads from the 17th on read the first KV head", "–",
           patch=attending(Parts(heads=_sixteen_heads))),
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
    Mutant("W01", "Sizes the slot mapping one row too small with overlap", "sglang#22778",
           resized("slot_mapping", short_if(lambda g: g.limits.overlap))),
    Mutant("W02", "Sizes rows by max_num_reqs when a captured size exceeds it", "sglang#25124",
           resized("slot_mapping", _uncaptured)),
    Mutant("W75", "Stores the plan in a global", "vllm#48261", patch=_global_plan),
    Mutant("W81", "Clamps bounds to the context limit, though the device may be ahead",
           "sglang#30217", patch=on_host_lengths(_context_bound)),
    Mutant("W88", "Does not attend rows after the live rows of the first batch", "TRT-LLM#17110", patch=_warm_shape),
    Mutant("Z06", "Makes the window one token too long from the third draft step on", "tokenspeed#613",
           patch=_with_window(lambda x, left: left + (x.mode is Mode.DRAFT and x.step >= 2))),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("R01", "R02", "R03"), "production.a_crowd_is_right"),
    "R06": "production.every_head_shape_is_right",
}
