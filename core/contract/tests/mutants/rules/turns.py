"""Mutants that the checks of `turns` kill."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from draftmark import Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache, is_recording

from ..designs.layouts import ONLY_TRITON
from ..designs.tutorial import Backend
from ..designs.tutorial_plans import plugin
from ..mutant import ONLY, Mutant, around

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


PLANS: list[tuple[int, ...]] = [(), ()]
"""Widths of the two newest plans of this process."""
NUMBERS = count()


def _two_plans(backend: Any) -> None:
    """Keep the widths at one of two places, which all backends of the process use in turn."""
    at = [0]

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        at[0] = next(NUMBERS) % 2
        PLANS[at[0]] = backend._widths

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        own, found = backend._widths, PLANS[at[0]]
        if not is_recording():
            backend._widths = found if len(found) == len(own) else tuple(max(1, one - 1) for one in own)
        original(q, cache, batch, out)
        backend._widths = own

    around(backend, "plan", plan)
    around(backend, "attend", attend)


SHAPES: list[Any] = []
"""Layer shapes of all backends, in the order in which they were opened."""


class TwoShapes(Backend):
    """Looks up its softmax scale among those of the two newest opens, and else uses the newest one."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        SHAPES.append(self.scale)
        self._number = len(SHAPES)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.scale = SHAPES[self._number - 1 if self._number > len(SHAPES) - 2 else -1]
        super().attend(q, cache, batch, out)


WINDOWS: dict[bool, int] = {}
"""Window of the newest layer without a window, and of the newest layer with one."""


def _two_windows(backend: Any) -> None:
    """Compile two variants of the kernel, without a window and with one; every window layer uses the newest window."""
    right = backend.geometry
    limited = right.attention.window_left >= 0
    WINDOWS[limited] = right.attention.window_left

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        backend.geometry = replace(right, attention=replace(right.attention, window_left=WINDOWS[limited]))
        original(q, cache, batch, out)
        backend.geometry = right

    around(backend, "attend", attend)


PLACES: list[int] = [0] * 4
"""Open that planned last at each of four places."""


def _four_plans(backend: Any) -> None:
    """Keep the plan at one of four places, in turn for each opened backend."""
    own = next(OPENS)

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        PLACES[own % 4] = own

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        if PLACES[own % 4] != own and not is_recording():
            out.zero_()

    around(backend, "plan", plan)
    around(backend, "attend", attend)


MUTANTS = (
    Mutant("H11", "Keeps the plan at one of four places, which backends use in turn", "a small cache of plans",
           patch=_four_plans),
    Mutant(
        "H08",
        "Keeps the plan at one of two places, which all backends of the process use in turn",
        "double buffering for a target and a draft model; a model with window layers needs a third place",
        patch=_two_plans,
    ),
    Mutant(
        "H09",
        "Finds its softmax scale only while it is one of the two newest opens",
        "a cache of two entries for a target and a draft model",
        plugin=plugin(TwoShapes),
        layouts=("tutorial",),
        absent=ONLY,
    ),
    Mutant(
        "H10",
        "Compiles one kernel for all layers with a window, with the window of the newest layer",
        "vllm#54374: one plan for layers of two windows",
        patch=_two_windows,
    ),
    Mutant("OE1", "Keeps the plans of two backends, in turn", "one static each for target and draft",
           patch=_target_or_draft, layouts=("csr",), absent="tried in csr"),
    Mutant("OE2", "Keeps host state in a cache of two backends", "lru_cache of a target and a draft",
           patch=_two_states, layouts=("reference",), absent="tried in reference"),
    Mutant("OE3", "Reads scale, cap and window from two places that backends take in turn", "constant memory",
           patch=_two_constants, layouts=("cuda_triton",), absent=ONLY_TRITON),
)  # fmt: skip
KILLER = {"H11": "turns.of_many_geometries_are_right"} | dict.fromkeys(
    (
        "H08",
        "H09",
        "H10",
        "OE1",
        "OE2",
        "OE3",
    ),
    "turns.of_three_geometries_are_right",
)
