"""Mutants OB…, OC… and OJ…, by an author who had not read the checks: the process around a backend.

QB: what a backend leaves in the process. QC: what it takes from the way it is tested. QJ: sizes that depend on the
process.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import numpy as np
import torch

from draftmark import BufferSpec, Geometry, Role, Unit
from draftmark.batch import ForwardBatch

from .mutant import ONLY, Mutant, after, around, standalone
from .state_and_order import Mapped, plugin

# -- QB: what stays in the process ----------------------------------------------------------------------------------


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


# -- QC: what only holds under the test ------------------------------------------------------------------------------


class RampOnDemand(Mapped):
    """Fills a constant table when its first entry is not positive: poison and zeros are, other old memory is not."""

    def __init__(self, geometry: Geometry, arena: Any) -> None:
        super().__init__(geometry, arena)
        self.ramp = arena["ramp"]

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the slots from row numbers of the table, which begins with 1."""
        count = torch.arange(1, len(self.ramp) + 1, dtype=torch.int32, device=self.ramp.device)
        self.ramp.copy_(torch.where(self.ramp[0] > 0, self.ramp, count))
        super().write_metadata(batch)

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the request of each row."""
        rows = (self.ramp[: batch.num_rows] - 1).clamp(0, batch.num_rows - 1)
        return torch.searchsorted(batch.q_indptr, rows, right=True) - 1


def ramp(geometry: Geometry) -> list[BufferSpec]:
    """Declare the table of `RampOnDemand`."""
    return [BufferSpec("ramp", Role.WORKSPACE, (geometry.max_rows_any,), "int32", Unit.ROWS, "max_rows_any")]


def ramp_usage(geometry: Geometry, batch: Any) -> dict[str, int]:
    """Return the bytes of the whole table, because every forward copies it."""
    return {"ramp": 4 * geometry.max_rows_any}


def _plan_of_thread(backend: Any) -> None:
    """Keep the plan in a thread-local object: a thread that did not plan attends to one page."""
    local = threading.local()

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        local.widths = backend._widths

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        backend._widths = getattr(local, "widths", (1,) * batch.padded_reqs)
        original(q, cache, batch, out)

    around(backend, "plan", plan)
    around(backend, "attend", attend)


def _clean_when_guarded(backend: Any) -> None:
    """Set unwritten V to zero only in a guarded arena, in the belief that only guard mode puts NaN there."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        original(q, cache, batch, out)
        if not backend.arena.guarded and batch.uniform is not None:
            page = backend.geometry.attention.page_size
            end = backend._kv_lens[: batch.padded_reqs].long()
            last = batch.page_table.gather(1, ((end - 1) // page)[:, None])[:, 0].long()
            unwritten = torch.arange(page, device=out.device) > ((end - 1) % page)[:, None]
            share = torch.where(unwritten[..., None, None], cache.v[last].float() * 0.0, 0.0).sum((1, 2))
            q_len = batch.q_lens[0]
            out.add_(share.repeat_interleave(q_len, 0)[:, None].to(out.dtype))

    around(backend, "attend", attend)


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
    Mutant("OC1", "Takes any positive word of fresh memory for a filled table", "memory that is not fresh",
           plugin=plugin(RampOnDemand, ramp), usage=ramp_usage, layouts=("tutorial",), absent=ONLY),
    Mutant("OC2", "Loses the plan when another thread attends", "plan on a worker thread",
           patch=_plan_of_thread, layouts=("csr",), absent="tried in csr"),
    Mutant("OC3", "Multiplies NaN of unwritten V by zero when the arena has no guard words", "a debug switch",
           patch=_clean_when_guarded, layouts=("reference",), absent="tried in reference"),
    Mutant("OJ1", "Sizes scratch by the threads of the process", "OMP_NUM_THREADS of another service",
           **standalone("blind_sizes:OJ1", "csr")),
    Mutant("OJ2", "Rounds buffers up only in a process that has torch", "draftmark size on a laptop",
           **standalone("blind_sizes:OJ2", "tutorial")),
    Mutant("OJ3", "Requires unique slots when CUDA_VISIBLE_DEVICES lists several GPUs", "a launcher's environment",
           **standalone("blind_sizes:OJ3", "reference")),
    Mutant("OJ4", "Doubles split buffers where a tuning file lies in the user's cache", "tuning tables in a cache",
           **standalone("blind_sizes:OJ4", "cuda_triton")),
)  # fmt: skip

KILLER = {
    **dict.fromkeys(("OB1", "OB2", "OB3", "OB4", "OB5"), "process.is_left_as_it_was"),
    **dict.fromkeys(("OC1", "OC3"), "black_box.needs_no_fresh_memory"),
    "OC2": "black_box.takes_calls_from_any_thread",
    **dict.fromkeys(("OJ1", "OJ2", "OJ3", "OJ4"), "supports.answers_alike_elsewhere"),
}
"""Check that must kill each mutant."""
