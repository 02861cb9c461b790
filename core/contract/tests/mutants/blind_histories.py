"""Mutants OA…, OD… and OE…, by an author who had not read the checks: what one forward or open leaves to the next.

QA: histories over modes and forms. QD: a second capture, a repeated capture, a forward after a refused one. QE: three
geometries alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.batch import ForwardBatch, Tree
from draftmark.errors import GraphError
from draftmark.graphs import GraphKey, GraphState, RecordedGraphState, is_recording

from .mutant import Mutant, around, on_batch

# -- QA: histories over modes and forms ---------------------------------------------------------------------------


def _plans_by_size(backend: Any) -> None:
    """Cache plans by (requests, rows, tail, budget). A ragged batch of R · D rows then finds the plan of VERIFY."""
    verify, plans = backend._decode_verify, {}

    def plan_of(original: Any, batch: ForwardBatch) -> Any:
        ragged = batch.mode is Mode.RAGGED_VERIFY
        most = backend.geometry.extent(batch.mode).q_len if ragged else batch.q_lens[0]
        size = batch.padded_reqs, most, most if ragged else batch.tail_lens[0], batch.num_rows
        if size not in plans:
            plans[size] = original(batch)
        return plans[size]

    around(verify, "_plan_of", plan_of)
    on_batch(_pages_in_use, "write_metadata", "attend")(backend)


def _pages_in_use(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Name the null page after the last page of each request, so that a wrong plan stays inside the pool."""
    if batch.mode is not Mode.RAGGED_VERIFY:
        return batch
    ends = batch.prefix_lens + batch.q_indptr.diff()
    column = torch.arange(batch.page_table.shape[1], dtype=torch.int32, device=batch.device)
    used = column * backend.geometry.attention.page_size < ends[:, None]
    return replace(batch, page_table=torch.where(used, batch.page_table, 0))


def _live_rows(backend: Any) -> None:
    """Zero output rows from the live rows of the last ragged batch on, in draft blocks too."""
    live = torch.full((), 2**31 - 1, dtype=torch.int32)

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        original(q, cache, batch, out)
        if batch.mode is Mode.RAGGED_VERIFY:
            live.copy_(batch.q_indptr[-1])
        if batch.mode is Mode.DRAFT_BLOCK:
            row = torch.arange(batch.num_rows, device=out.device)[:, None, None]
            out.copy_(torch.where(row < live, out, 0))

    around(backend, "attend", attend)


def _causal_bits_once(backend: Any) -> None:
    """Keep the tail's bits and depths while the sizes of causal tails are unchanged; a tree replaces what is kept."""
    kept: dict[str, Any] = {}

    def tail(original: Any, batch: ForwardBatch) -> Any:
        size = batch.q_lens[0], batch.tail_lens[0], batch.padded_reqs
        causal = not isinstance(batch.tail, Tree)
        if not causal or is_recording() or kept.get("size") != size:
            kept["tail"] = original(batch)
        if causal and not is_recording():
            kept["size"] = size
        return kept["tail"]

    around(backend, "_tail", tail)


def _slots_by_address(backend: Any) -> None:
    """Copy the engine's slots only when they come from another address than in the last forward."""
    last = [0, 0]

    def write(original: Any, batch: ForwardBatch) -> None:
        if batch.slots is None or is_recording():
            original(batch)
            return
        here, before = [batch.slots.data_ptr(), batch.num_rows], backend._slots[: batch.num_rows].clone()
        original(batch)
        if here == last:
            backend._slots[: batch.num_rows].copy_(before)
        last[:] = here

    around(backend, "write_metadata", write)


# -- QD: second lives ---------------------------------------------------------------------------------------------


def _captured_once(backend: Any) -> None:
    """Write metadata in the first capture of each mode and size only: a graph state opened later has none."""
    captured: set[tuple[Mode, int, int]] = set()

    def write(original: Any, batch: ForwardBatch) -> None:
        if not is_recording() or (batch.mode, batch.step, batch.padded_reqs) not in captured:
            original(batch)

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        if is_recording():
            captured.add((batch.mode, batch.step, batch.padded_reqs))

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


def _window_put_aside(backend: Any) -> None:
    """Attend without a window to requests that it covers whole. After a refused attend the window stays away."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        right = backend.geometry
        longest = max((n + t for n, t in zip(batch.host.upper_bound(), batch.tail_lens, strict=False)), default=0)
        if longest <= right.attention.window_left:
            backend.geometry = replace(right, attention=replace(right.attention, window_left=-1))
        original(q, cache, batch, out)
        backend.geometry = right

    around(backend, "attend", attend)


def _step_left_open(backend: Any) -> None:
    """Write metadata once a step, until `attend` closes the step. A step that fails before attend stays open."""
    step = {"open": False}

    def write(original: Any, batch: ForwardBatch) -> None:
        if not step["open"]:
            step["open"] = True
            original(batch)

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        step["open"] = False

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


class NotedBefore(RecordedGraphState):
    """Notes a key before the capture, so a capture that failed cannot be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: set[GraphKey] = set()

    def capture(self, key: GraphKey, step: Callable[[], Any]) -> Any:
        """Capture `step`, or refuse a key for which a capture was begun."""
        if key in self.noted:
            raise GraphError(f"graph {key} is already captured; replay it")
        self.noted.add(key)
        return super().capture(key, step)


def _noting(geometry: Geometry, state: GraphState) -> GraphState:
    return NotedBefore() if isinstance(state, RecordedGraphState) else state


# -- QE: three geometries -----------------------------------------------------------------------------------------

SIDES: list[tuple[int, ...]] = [(), ()]
"""Page counts of the newest plan of a target and of a draft model."""
OPENS = count()


def _target_or_draft(backend: Any) -> None:
    """Keep the plan at one of two places, in turn for each opened backend, as if only a target and a draft existed."""
    side = next(OPENS) % 2

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        SIDES[side] = backend._widths

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        # Graphs are planned for the longest requests, so a step that is captured has widths of its own.
        found, own = SIDES[side], backend._widths
        if not is_recording() and len(found) == len(own):
            backend._widths = found
        original(q, cache, batch, out)
        backend._widths = own

    around(backend, "plan", plan)
    around(backend, "attend", attend)


@lru_cache(maxsize=2)
def _state_of(backend: int) -> dict[str, tuple[int, ...]]:
    """Return the host state of a backend: one for a target and one for a draft model are alive."""
    return {}


def _two_states(backend: Any) -> None:
    """Keep the plan's page counts in a cache of two backends; the oldest one attends to its first page again."""

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        _state_of(id(backend))["widths"] = backend._widths

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        backend._widths = _state_of(id(backend)).get("widths", (1,) * batch.padded_reqs)
        original(q, cache, batch, out)

    around(backend, "plan", plan)
    around(backend, "attend", attend)


CONSTANTS: list[Any] = [None, None]
"""Attention parameters of a target and a draft model, as constant memory would hold them."""
UPLOADS = count()


def _two_constants(backend: Any) -> None:
    """Read scale, cap and window from one of two places, which opened backends take in turn."""
    side, verify = next(UPLOADS) % 2, backend._decode_verify
    CONSTANTS[side] = verify._shape

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        own, there = verify._shape, CONSTANTS[side]
        verify._shape = replace(own, scale=there.scale, cap=there.cap, window_left=there.window_left)
        original(q, cache, batch, out)
        verify._shape = own

    around(backend, "attend", attend)


ONLY_CSR = "only csr keeps this state between forwards"
ONLY_REFERENCE = "csr serves core modes and forms only"
ONLY_TRITON = "a cache of cuda_triton's host code"
ONLY_TUTORIAL = "written for the tutorial's backend"

MUTANTS = (
    Mutant("OA1", "Finds the plan of VERIFY for a ragged batch of equal size", "a cache keyed on too little",
           patch=_plans_by_size, layouts=("cuda_triton",), absent=ONLY_TRITON),
    Mutant("OA2", "Zeroes rows of a draft block by the live rows of the last ragged batch", "a static that survives",
           patch=_live_rows, layouts=("reference",), absent=ONLY_REFERENCE),
    Mutant("OA3", "Keeps a causal tail's bits by size, and lets a tree replace them", "a cache keyed on too little",
           patch=_causal_bits_once, layouts=("csr",), absent=ONLY_CSR),
    Mutant("OA4", "Copies engine slots only when their address changes", "a cache keyed on an address",
           patch=_slots_by_address, layouts=("reference",), absent=ONLY_REFERENCE),
    Mutant("OD1", "Writes metadata only in the first capture of a mode and size", "capture after sleep and wake",
           patch=_captured_once, layouts=("csr",), absent="tried in csr"),
    Mutant("OD2", "Loses the window when attend is refused", "a restore that is not in finally",
           patch=_window_put_aside, layouts=("csr",), absent="tried in csr"),
    Mutant("OD3", "Writes no metadata after a step that failed before attend", "a flag that a failure leaves set",
           patch=_step_left_open, layouts=("tutorial",), absent=ONLY_TUTORIAL),
    Mutant("OD4", "Refuses to repeat a capture that failed", "a key noted before the capture",
           {"graph_state": _noting}, layouts=("reference",), absent="tried in reference"),
    Mutant("OE1", "Keeps the plans of two backends, in turn", "one static each for target and draft",
           patch=_target_or_draft, layouts=("csr",), absent="tried in csr"),
    Mutant("OE2", "Keeps host state in a cache of two backends", "lru_cache of a target and a draft",
           patch=_two_states, layouts=("reference",), absent="tried in reference"),
    Mutant("OE3", "Reads scale, cap and window from two places that backends take in turn", "constant memory",
           patch=_two_constants, layouts=("cuda_triton",), absent=ONLY_TRITON),
)  # fmt: skip

KILLER = {
    **dict.fromkeys(("OA1", "OA2", "OA3", "OA4"), "random_history.equals_the_oracle"),
    "OD1": "second_lives.of_a_graph_is_right",
    **dict.fromkeys(("OD2", "OD3"), "second_lives.of_a_forward_is_right"),
    "OD4": "second_lives.of_a_capture_is_right",
    **dict.fromkeys(("OE1", "OE2", "OE3"), "turns.of_three_geometries_are_right"),
}
"""Check that must kill each mutant."""
