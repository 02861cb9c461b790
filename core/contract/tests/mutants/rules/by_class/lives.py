"""Mutants of the classes A to E: histories, the process, black boxes, second lives, several geometries."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, Tree

from ...designs.tutorial import Backend
from ...designs.tutorial_plans import plugin
from ...mutant import ONLY, Mutant, around, standalone

CSR: dict[str, Any] = {"layouts": ("csr",), "absent": "tried in csr"}
TRITON: dict[str, Any] = {"layouts": ("cuda_triton",), "absent": "tried in cuda_triton"}
TUTORIAL: dict[str, Any] = {"layouts": ("tutorial",), "absent": ONLY}


# A: histories


def _mask_of_depths(backend: Any) -> None:
    """Copy a tree's mask only if the depths differ from those of the last tree."""
    if "tail_mask" not in backend.arena:
        return
    depths, masks = (torch.zeros_like(backend.arena[name]) for name in ("tail_depth", "tail_mask"))

    def write(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        rows, requests, tail = batch.num_rows, batch.padded_reqs, batch.tail_lens[0]
        depth, mask = backend.arena["tail_depth"][:requests, :tail], backend.arena["tail_mask"][:rows]
        same = (depths[:requests, :tail] == depth).all()
        mask.copy_(torch.where(same & isinstance(batch.tail, Tree), masks[:rows], mask))
        depths[:requests, :tail] = depth
        masks[:rows] = mask

    around(backend, "_write_tail", write)


class SameLengths(Backend):
    """Keeps the slots of the last step of this mode if the prefix lengths are those of that step."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        none = torch.full((geometry.max_reqs,), -1, dtype=torch.int32, device=self.slots.device)
        self.lens = {mode: none.clone() for mode in Mode}
        self.kept = {mode: torch.zeros_like(self.slots) for mode in Mode}

    def write_metadata(self, batch: ForwardBatch) -> None:
        super().write_metadata(batch)
        rows, requests = batch.num_rows, batch.padded_reqs
        lens, kept = self.lens[batch.mode], self.kept[batch.mode]
        same = (lens[:requests] == batch.prefix_lens).all() & (batch.tail_lens[0] == 1 if requests else False)
        self.slots[:rows] = torch.where(same, kept[:rows], self.slots[:rows])
        lens[:requests] = batch.prefix_lens
        kept[:rows] = self.slots[:rows]


# B: the process


def _quiet(backend: Any) -> None:
    """Turn the warnings of the whole process off."""
    logging.disable(logging.WARNING)


def _flushes(backend: Any) -> None:
    """Let the processor round denormal numbers to zero."""
    torch.set_flush_denormal(True)


class Descriptor(Backend):
    """Opens a file for each backend, and leaves it open."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        os.open(os.devnull, os.O_RDONLY)


# D: second lives


def _guarded_store(backend: Any) -> None:
    """Skip a store that begins inside of another store. A store that raised counts as one that never ended."""
    inside = [False]

    def write(original: Any, *args: Any) -> None:
        if inside[0]:
            inside[0] = False
            return
        inside[0] = True
        original(*args)
        inside[0] = False

    around(backend, "write_kv", write)


def _plans_before_first_refusal(backend: Any) -> None:
    """Keep the plan of the last good step after a step that attend refused."""
    refused = [False]

    def plan(original: Any, batch: ForwardBatch) -> None:
        kept, again = backend._widths, refused[0]
        refused[0] = False
        original(batch)
        if again and len(kept) == len(backend._widths):
            backend._widths = kept

    def attend(original: Any, *args: Any) -> None:
        refused[0] = True
        original(*args)
        refused[0] = False

    around(backend, "plan", plan)
    around(backend, "attend", attend)


# E: more than two geometries alive

PLANS: dict[Geometry, tuple[int, ...]] = {}
"""Newest widths by geometry, as a cache of plans that two modules with one geometry share."""


def _plan_of_geometry(backend: Any) -> None:
    """Keep the plan in a cache by geometry, so two MTP modules of one geometry share it."""

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        PLANS[backend.geometry] = backend._widths

    def attend(original: Any, *args: Any) -> None:
        own, found = backend._widths, PLANS.get(backend.geometry, ())
        backend._widths = found if len(found) == len(own) else own
        original(*args)
        backend._widths = own

    around(backend, "plan", plan)
    around(backend, "attend", attend)


NEWEST: dict[tuple[int, int], Any] = {}
"""Newest attention shape by head_dim and page size, as constants of one compiled kernel."""


def _shape_of_kernel(backend: Any) -> None:
    """Read scale and cap from the newest open with this head_dim, page size and window."""
    verify = getattr(backend, "_decode_verify", None)
    if verify is None:
        return
    key = (backend.geometry.attention.head_dim, backend.geometry.attention.page_size)
    NEWEST[key] = verify._shape

    def attend(original: Any, *args: Any) -> None:
        own, newest = verify._shape, NEWEST[key]
        if newest.window_left == own.window_left:
            verify._shape = replace(own, scale=newest.scale, cap=newest.cap)
        original(*args)
        verify._shape = own

    around(backend, "attend", attend)


MUTANTS = (
    Mutant("OA5", "Copies a tree's mask only if the depths have changed", "a cache of masks", patch=_mask_of_depths,
           **CSR),
    Mutant("OA6", "Keeps the slots of a step with the lengths of the step before", "a cache of slots",
           plugin=plugin(SameLengths), **TUTORIAL),
    Mutant("OB6", "Turns the log messages of the process off when it is opened", "a quiet library", patch=_quiet,
           **TRITON),
    Mutant("OB7", "Lets the processor flush denormal numbers when it is opened", "fast-math of a library",
           patch=_flushes, **CSR),
    Mutant("OB8", "Leaves a file open for each open", "a handle of a driver", plugin=plugin(Descriptor), **TUTORIAL),
    Mutant("OC4", "Reads version counters, which tensors of inference mode lack", "torch.inference_mode",
           **standalone("blind_processes:OC4", "csr")),
    Mutant("OC5", "Loses part of the last row if torch has several threads", "a race of two threads",
           **standalone("blind_processes:OC5", "tutorial")),
    Mutant("OD5", "Drops the store after a store that failed", "a guard against re-entry", patch=_guarded_store, **CSR),
    Mutant("OD6", "Keeps the earlier plan after a step that attend refused", "a plan that is rolled back",
           patch=_plans_before_first_refusal, **CSR),
    Mutant("OE4", "Shares the plan of two backends with equal geometries", "MTP modules of one geometry",
           patch=_plan_of_geometry, **CSR),
    Mutant("OE5", "Reads scale and cap of the newest open with its head_dim, page size and window",
           "constants of a compiled kernel", patch=_shape_of_kernel, **TRITON),
)  # fmt: skip
KILLER = {
    "OA5": "random_history.equals_the_oracle",
    "OA6": "guards.find_no_poison_read",
    **dict.fromkeys(("OB6", "OB7", "OB8"), "process.is_left_as_it_was"),
    **dict.fromkeys(("OC4", "OC5"), "black_box.gives_the_same_results"),
    **dict.fromkeys(("OD5", "OD6"), "second_lives.of_a_forward_is_right"),
    **dict.fromkeys(("OE4", "OE5"), "turns.of_three_geometries_are_right"),
}
