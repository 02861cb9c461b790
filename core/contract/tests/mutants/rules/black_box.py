"""Mutants that the checks of `black_box` kill."""

from __future__ import annotations

import threading
from typing import Any

import torch

from draftmark import BufferSpec, Geometry
from draftmark.runtime import ForwardBatch

from ..designs.tutorial_plans import Mapped, plugin
from ..mutant import ONLY, Mutant, around, standalone


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
    return [BufferSpec("ramp", (geometry.max_rows_any,), "int32", "max_rows_any")]


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
        if not backend.arena.guarded and batch.uniform:
            page = backend.geometry.attention.page_size
            end = backend._kv_lens[: batch.padded_reqs].long()
            last = batch.page_table.gather(1, ((end - 1) // page)[:, None])[:, 0].long()
            unwritten = torch.arange(page, device=out.device) > ((end - 1) % page)[:, None]
            share = torch.where(unwritten[..., None, None], cache.v[last].float() * 0.0, 0.0).sum((1, 2))
            q_len = batch.q_lens[0]
            out.add_(share.repeat_interleave(q_len, 0)[:, None].to(out.dtype))

    around(backend, "attend", attend)


MUTANTS = (
    Mutant(
        "B01",
        "Keeps the widths of a plan in thread-local storage",
        "an engine that plans on a thread of its own and launches on another",
        **standalone("processes:B01", "csr"),
    ),
    Mutant(
        "B02",
        "Writes metadata only in the context in which it has planned",
        "context variables; executors and asyncio give each call another context",
        **standalone("processes:B02", "tutorial"),
    ),
    Mutant(
        "B03",
        "Adds its result to an output from which only NaN was removed",
        "split-KV partial sums in memory that a test fills with NaN and an allocator does not",
        **standalone("processes:B03", "csr"),
    ),
    Mutant(
        "B04",
        "Is exact only where a package of tests is loaded",
        "debug switches that depend on the presence of pytest",
        **standalone("processes:B04", "reference"),
    ),
    Mutant(
        "B05",
        "Imports the suite when it is opened",
        "a helper of the tests in the step path; an engine does not install the suite",
        **standalone("processes:B05", "tutorial"),
    ),
    Mutant(
        "B06",
        "Sets a signal handler during a plan, which only the main thread can",
        "compilers that shield themselves from Ctrl-C",
        **standalone("processes:B06", "csr"),
    ),
    Mutant(
        "B07",
        "Switches on cuDNN's benchmark when the first backend of a process is opened",
        "global switches at first use; a later look at the process finds no change",
        **standalone("processes:B07", "tutorial"),
    ),
    Mutant("OC1", "Takes any positive word of fresh memory for a filled table", "memory that is not fresh",
           plugin=plugin(RampOnDemand, ramp), usage=ramp_usage, layouts=("tutorial",), absent=ONLY),
    Mutant("OC2", "Loses the plan when another thread attends", "plan on a worker thread",
           patch=_plan_of_thread, layouts=("csr",), absent="tried in csr"),
    Mutant("OC3", "Multiplies NaN of unwritten V by zero when the arena has no guard words", "a debug switch",
           patch=_clean_when_guarded, layouts=("reference",), absent="tried in reference"),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("B01", "B02", "B03", "B04", "B05", "B06", "B07"), "black_box.gives_the_same_results"),
    **dict.fromkeys(("OC1", "OC3"), "black_box.needs_no_fresh_memory"),
    "OC2": "black_box.takes_calls_from_any_thread",
}
