"""Mutants that the checks of `process` kill."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import resource
import threading
import warnings
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from draftmark import Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache

from ..designs.tutorial import Backend
from ..designs.tutorial_plans import plugin
from ..mutant import ONLY, Mutant, after, around


def _no_collection(backend: Any) -> None:
    """Stop the garbage collector for the step, and start it again only when the next plan begins."""

    def plan(original: Any, batch: ForwardBatch) -> None:
        gc.enable()
        original(batch)
        gc.disable()

    around(backend, "plan", plan)


def _seeds_python(backend: Any) -> None:
    """Choose a salt for log lines from a fixed seed, in Python's own generator."""
    random.seed(1234)
    backend.salt = random.random()


def _watchdog(backend: Any) -> None:
    """Start a thread that waits for the backend's end. The thread itself keeps the backend and its arena alive."""

    def watch(one: Any, ended: threading.Event) -> None:
        ended.wait()
        one.arena.check()

    threading.Thread(target=watch, args=(backend, threading.Event()), daemon=True).start()


def _numpy_is_silent(backend: Any) -> None:
    """Silence NumPy's floating-point warnings, which the interpreter would print, for the whole process."""
    after(backend, "plan", lambda batch: np.seterr(all="ignore"))


def _workspace_variable(backend: Any) -> None:
    """Set the workspace of cuBLAS by the environment of the process, which its children inherit."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"


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


def _descriptors(backend: Any) -> None:
    """Allocate a block of native memory for each plan's launch descriptors, and free none before the backend ends."""
    heap = ctypes.CDLL(None)
    heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    kept, plans = (ctypes.c_void_p * 80_000)(), itertools.count()
    after(backend, "plan", lambda batch: kept.__setitem__(next(plans), heap.malloc(512)))
    weakref.finalize(backend, lambda: [heap.free(one) for one in kept])


def _open_files(backend: Any) -> None:
    """Open a file for a profile of every 64th plan, and close none before the backend ends."""
    kept, plans = array("i"), itertools.count()
    after(backend, "plan", lambda batch: next(plans) % 64 or kept.append(os.open(os.devnull, os.O_RDONLY)))
    weakref.finalize(backend, lambda: [os.close(one) for one in kept])


def _core_dumps(backend: Any) -> None:
    """Switch core dumps of the process on or off, for a handler of crashes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limited = 4096 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else limited, hard))


def _mutant(number: int, what: str, source: str, patch: Callable[[Any], None], layout: str) -> Mutant:
    return Mutant(f"P{number:02}", what, source, patch=patch, layouts=(layout,), absent=_ABSENT)


def _of_tutorial(number: int, what: str, source: str, backend: type[Backend]) -> Mutant:
    return Mutant(f"P{number:02}", what, source, layouts=("tutorial",), absent=ONLY, plugin=plugin(backend))


MUTANTS = (
    Mutant("OB1", "Leaves the garbage collector off after plan", "a process switch",
           patch=_no_collection, layouts=("csr",), absent="tried in csr"),
    Mutant("OB2", "Seeds Python's random generator when it is opened", "a process-wide generator",
           patch=_seeds_python, layouts=("tutorial",), absent="tried in the tutorial's backend"),
    Mutant("OB3", "Keeps the arena alive in a thread after the engine drops the backend", "a watchdog",
           patch=_watchdog, layouts=("reference",), absent="tried in reference"),
    Mutant("OB4", "Silences NumPy's floating-point errors in the process", "a process switch",
           patch=_numpy_is_silent, layouts=("cuda_triton",), absent="only cuda_triton runs NumPy code here"),
    Mutant("OB5", "Sets an environment variable of the process when it is opened", "a process switch",
           patch=_workspace_variable, layouts=("csr",), absent="tried in csr"),
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
    _mutant(10, "Keeps a block of native memory for each plan", "launch descriptors", _descriptors, "reference"),
    _mutant(11, "Leaves a file open after every 64th plan", "profiles and shared memory", _open_files, "csr"),
    _mutant(12, "Changes the limit of core dumps when it is opened", "crash handlers", _core_dumps, "reference"),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(
        ("OB1", "OB2", "OB3", "OB4", "OB5", "P01", "P02", "P06", "P07", "P12"), "process.is_left_as_it_was"
    ),
    **dict.fromkeys(("P03", "P04", "P09", "P10", "P11"), "process.plans_serve_for_long"),
    **dict.fromkeys(("P05", "P08"), "process.steps_serve_for_long"),
}
