"""Mutants P01 … P09: they change the process, leave memory in it, or are wrong after thousands of calls."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from draftmark import Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache

from .mutant import ONLY, Mutant, after, around
from .state_and_order import plugin
from .tutorial import Backend

_ABSENT = "the defect is the same in every layout; one shows it"
_PLANNED: dict[Any, tuple[int, ...]] = {}
_KEPT: list[torch.Tensor] = []


def _seeds(backend: Any) -> None:
    """Set torch's seed before the softmax, as a kernel with dropout does."""
    around(backend, "attend", lambda original, *args: (torch.manual_seed(0), original(*args))[1])


class Fast(Backend):
    """Allows TF32 in the whole process when it is opened."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        torch.backends.cuda.matmul.allow_tf32 = True


def _memo(backend: Any) -> None:
    """Keep the widths of every plan, keyed by the batch's lengths, in a dictionary of the module."""

    def plan(original: Callable[[ForwardBatch], None], batch: ForwardBatch) -> None:
        original(batch)
        backend._widths = _PLANNED.setdefault((batch.mode, batch.host, batch.tail_lens), backend._widths)

    around(backend, "plan", plan)


def _pinned(backend: Any) -> None:
    """Keep a new staging tensor of the lengths of each batch until the copy to the device is known to be done."""
    after(backend, "plan", lambda batch: _KEPT.append(torch.tensor(batch.host.upper_bound())))


class Ring(Backend):
    """Takes the slots from a ring with an index of 12 bits. Its first entry is never written again."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self._next = itertools.count(1)

    def write_metadata(self, batch: ForwardBatch) -> None:
        if next(self._next) & 0xFFF:
            super().write_metadata(batch)
        else:
            self.slots[: batch.num_rows].zero_()


def _silent(backend: Any) -> None:
    """Silence the warnings of a vendor's library, and of everybody else."""
    after(backend, "plan", lambda batch: warnings.filterwarnings("ignore", message="deprecated"))


def _jitter(backend: Any) -> None:
    """Draw a start for the search of free work items from Python's generator."""
    after(backend, "plan", lambda batch: random.random())


class Wrapped(Backend):
    """Counts layers in 12 bits, and takes the first one for a layer with an output that was stored before."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self._layers = 0

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._layers = (self._layers + 1) % 4096
        if self._layers:
            super().attend(q, cache, batch, out)
        else:
            out.zero_()


def _wide(backend: Any) -> None:
    """Count plans in 16 bits, and take the first plan for a warm-up with one page for each request."""
    plans = itertools.count(1)

    def then(batch: ForwardBatch) -> None:
        if next(plans) & 0xFFFF == 0:
            backend._widths = tuple(min(1, n) for n in backend._widths)

    after(backend, "plan", then)


def _mutant(number: int, what: str, source: str, patch: Callable[[Any], None], layout: str) -> Mutant:
    return Mutant(f"P{number:02}", what, source, patch=patch, layouts=(layout,), absent=_ABSENT)


def _of_tutorial(number: int, what: str, source: str, backend: type[Backend]) -> Mutant:
    return Mutant(f"P{number:02}", what, source, layouts=("tutorial",), absent=ONLY, plugin=plugin(backend))


MUTANTS = (
    _mutant(1, "Sets torch's seed in attend", "kernels with dropout; every sampler then repeats itself", _seeds, "csr"),
    _of_tutorial(2, "Allows TF32 in the process when it is opened", "vendor examples set it at import", Fast),
    _mutant(
        3,
        "Keeps the widths of every plan in a dictionary, keyed by all lengths",
        "memoised plans; a server's memory grows by each step for weeks",
        _memo,
        "reference",
    ),
    _mutant(
        4,
        "Keeps a staging tensor of each plan in a list of its module",
        "keep-alive lists for asynchronous copies that are never emptied",
        _pinned,
        "csr",
    ),
    _of_tutorial(5, "Writes slots from a ring with an index of 12 bits", "rings of staging buffers", Ring),
    _mutant(6, "Adds a filter of warnings in plan", "libraries that silence others", _silent, "csr"),
    _mutant(7, "Draws from Python's generator in plan", "seeded servers give other texts", _jitter, "reference"),
    _of_tutorial(8, "Writes zeros in each 4,096th call of attend", "a layer counter of 12 bits", Wrapped),
    _mutant(9, "Gathers one page after 65,536 plans", "a plan counter of 16 bits", _wide, "csr"),
)

KILLER = {
    **dict.fromkeys(("P01", "P02", "P06", "P07"), "process.is_left_as_it_was"),
    **dict.fromkeys(("P03", "P04", "P09"), "process.plans_serve_for_long"),
    **dict.fromkeys(("P05", "P08"), "process.steps_serve_for_long"),
}
"""Check that must kill each mutant."""
