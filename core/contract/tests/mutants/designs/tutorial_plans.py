"""Parts that several mutants share: tutorial_plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark import BufferSpec, Geometry
from draftmark.runtime import Arena, ForwardBatch, GraphState, KeyedGraphState, TorchTreeOps, to_device

from .tutorial import Backend
from .tutorial import Plugin as Tutorial


class Mapped(Backend):
    """The tutorial's backend, with `write_metadata` in three parts: request of each row, tail length, and slots."""

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        return torch.searchsorted(batch.q_indptr, rows, right=True) - 1

    def tail_of(self, batch: ForwardBatch) -> Any:
        return batch.tail_lens[0] if batch.uniform else batch.q_indptr.diff()

    def write_metadata(self, batch: ForwardBatch) -> None:
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request, page_size = self.request_of(batch).long(), self.shape.page_size
        end = (batch.prefix_lens + self.tail_of(batch))[request]
        position = (end - (batch.q_indptr[request + 1] - rows)).long()
        page = batch.page_table[request, position // page_size].long()
        self.slots[: batch.num_rows] = page * page_size + position % page_size


class Planned(Backend):
    """The tutorial's backend with a plan: it copies length bounds to the device, and attend ignores keys beyond."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.bounds = self.own_bounds(geometry, arena)

    def own_bounds(self, geometry: Geometry, arena: Arena) -> torch.Tensor:
        return arena["bounds"]

    def plan(self, batch: ForwardBatch) -> None:
        self.send(bounds_of(batch))

    def send(self, lens: tuple[int, ...]) -> None:
        self.bounds[: len(lens)].copy_(to_device(lens, self.bounds.device, torch.int32))

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        seen = super()._visible(batch, request, rows, prefix, tail_len)
        key = torch.arange(self.width, device=prefix.device)
        return seen & (key < self.bounds[request] + tail_len)


def bounds_of(batch: ForwardBatch) -> tuple[int, ...]:
    """Return the host's upper bound of every prefix, 0 for padded requests."""
    return (*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs))


def schedule(geometry: Geometry) -> list[BufferSpec]:
    """Declare the buffer of `Planned`. It starts with zeros and is not cleared between steps."""
    shape = (geometry.max_reqs,)
    return [BufferSpec("bounds", shape, "int32", "max_reqs", zeros=True)]


def schedule_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    return {"bounds": 4 * batch.padded_reqs}


def plugin(
    backend: type[Backend] = Backend,
    more: Callable[[Geometry], list[BufferSpec]] | None = None,
    tree: type[TorchTreeOps] | None = None,
    graphs: type[KeyedGraphState] | None = None,
) -> type[Tutorial]:
    """Return the tutorial's plugin with another backend, more buffers, other tree operations or graph state."""

    class Plugin(Tutorial):
        def buffers(self, geometry: Geometry) -> list[BufferSpec]:
            return super().buffers(geometry) + (more(geometry) if more else [])

        def open_backend(self, geometry: Geometry, arena: Arena) -> Backend:
            return backend(geometry, arena)

        def tree_ops(self, geometry: Geometry, device: torch.device) -> TorchTreeOps | None:
            return tree(geometry) if tree else None

        def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
            return graphs() if graphs and device.type == "cpu" else super().graph_state(geometry, device)

    return Plugin
