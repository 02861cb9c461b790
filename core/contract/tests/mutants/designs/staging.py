"""A correct `plan` that sends numbers to the device through pinned memory; base of the late-device mutants.

plan() writes the number of live requests and the host's length bound of each request to a pinned slot, and enqueues
its copy to the device. write_metadata then clamps each prefix length to its bound. With the numbers of the same round
the clamp changes nothing. With the numbers of another round the clamp makes lengths too short. Slots alternate. Each
slot has a fence and stays alive until its copies end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftmark import BufferSpec, Geometry
from draftmark.batch import ForwardBatch
from draftmark.graphs import record_call
from draftmark.transfer import Fence, fence

from ..mutant import around

SLOTS = 2
NUMBERS, STAGED = "plan_numbers", "plan_staging"


def buffers(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    """Add two buffers to the layout's: the pinned slots of the numbers, and their copy on the device."""
    count = geometry.max_reqs + 1
    staged = BufferSpec(STAGED, (SLOTS, count), "int32", "slots × numbers", pinned=True)
    numbers = BufferSpec(NUMBERS, (count,), "int32", "max_reqs + 1")
    return [*specs, numbers, staged]


def usage(geometry: Geometry, found: dict[str, int], batch: Any) -> dict[str, int]:
    """Add the bytes of both buffers to the usage of a batch; they do not depend on the batch."""
    size = 4 * (geometry.max_reqs + 1)
    return {**found, NUMBERS: size, STAGED: SLOTS * size}


HOOKS: dict[str, Callable[..., Any]] = {"buffers": buffers, "usage": usage}


class Staging:
    """Sends a plan's numbers to the device through pinned slots. Each mutant overrides one method.

    Args:
        slots: int32 ``[SLOTS, numbers]``, pinned.
        target: int32 ``[numbers]``, on the device.
    """

    def __init__(self, slots: torch.Tensor, target: torch.Tensor) -> None:
        self.slots, self.target = list(slots), target
        self.fences: list[Fence] = [fence(target.device) for _ in self.slots]
        self.turn = 0
        self.keep(slots)

    def keep(self, slots: torch.Tensor) -> None:
        """Keep the pinned memory alive until its last copies end."""
        weakref.finalize(self, _drain, self.fences, slots).atexit = False

    def send(self, batch: ForwardBatch, numbers: Sequence[int]) -> None:
        """Copy a plan's numbers to the device."""
        index = self.choose(batch)
        self.wait(index)
        self.slots[index].copy_(torch.tensor(numbers, dtype=torch.int32))
        self.copy(index)
        self.fences[index].record()

    def choose(self, batch: ForwardBatch) -> int:
        """Return the index of the pinned slot to use for this batch."""
        self.turn += 1
        return self.turn % SLOTS

    def wait(self, index: int) -> None:
        """Wait until the previous copy from this pinned slot has ended."""
        self.fences[index].synchronize()

    def copy(self, index: int) -> None:
        """Enqueue the copy from this pinned slot to the device."""
        self.target.copy_(self.slots[index], non_blocking=True)

    def before_use(self) -> None:
        """Do nothing; mutants override it. write_metadata calls it right before it reads the numbers on the device."""


class Launched(Staging):
    """Copies by a library call, as FlashInfer's plan does, so torch's allocator does not track the copy."""

    def copy(self, index: int) -> None:
        record_call(_copy, self.slots[index], self.target, mutates=(self.target,))


class Blocking(Staging):
    """Uses one pinned slot, and the host waits for each copy: slow but correct."""

    def choose(self, batch: ForwardBatch) -> int:
        return 0

    def wait(self, index: int) -> None:
        """Do nothing: no copy is pending."""

    def copy(self, index: int) -> None:
        self.target.copy_(self.slots[index])


RIGHT: dict[str, type[Staging]] = {"fenced": Staging, "launched": Launched, "blocking": Blocking}


def staged(kind: type[Staging]) -> Callable[[Any], None]:
    """Return a patch that makes plan() send numbers with class `kind`, and makes write_metadata use them."""

    def patch(backend: Any) -> None:
        arena, geometry = backend.arena, backend.geometry
        numbers = arena[NUMBERS]
        backend.staging = staging = kind(arena[STAGED], numbers)

        def plan(original: Any, batch: ForwardBatch) -> None:
            original(batch)
            bounds = batch.host.upper_bound()
            staging.send(batch, (batch.num_reqs, *bounds, *[0] * (geometry.max_reqs - len(bounds))))

        def write(original: Any, batch: ForwardBatch) -> None:
            staging.before_use()
            reqs = batch.padded_reqs
            bounds = numbers[1 : reqs + 1]
            live = torch.arange(reqs, dtype=torch.int32, device=batch.device) < numbers[0]
            lens = torch.where(live, torch.minimum(batch.prefix_lens, bounds), 0)
            original(replace(batch, prefix_lens=lens.to(torch.int32)))

        around(backend, "plan", plan)
        around(backend, "write_metadata", write)

    return patch


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _drain(fences: Sequence[Fence], slots: torch.Tensor) -> None:
    for one in fences:
        one.synchronize()
    del slots
