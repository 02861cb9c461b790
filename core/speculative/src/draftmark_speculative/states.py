"""Layers with recurrent state of one model: a geometry, backend and pool per distinct shape, and the slots of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmark import LoadedBackend, RequestError, StateGeometry, StateShape, ceil_div
from draftmark.runtime import (
    Arena,
    ForwardBatch,
    StateBackend,
    StateCache,
    StatePool,
    device_profile,
    to_device,
)

from .config import EngineConfig
from .slots import StateSlots


@dataclass(frozen=True)
class StateGroup:
    """Holds the geometry, arena, backend and slots of the layers that share one state shape."""

    geometry: StateGeometry
    arena: Arena
    backend: StateBackend
    pool: StatePool


class StateLayers:
    """Runs all layers with recurrent state of one model; the part of `AttentionLayers` that serves `StateRun`.

    A request owns one slot of every pool while it has a row. Padding uses null slots.

    Attributes:
        groups: one for each distinct shape.
        slots: the slots of all rows.

    Args:
        shapes: shape of each layer with state, in order.
        geometries: geometry of each distinct shape, in order of first use.
        unique: a backend needs distinct slots for padded requests too.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        geometries: Sequence[StateGeometry],
        loaded: LoadedBackend,
        config: EngineConfig,
        device: torch.device,
        unique: bool,
    ) -> None:
        nulls = geometries[0].null_slots(unique)
        total = nulls + state_slots(config)
        self.groups = []
        for geometry in geometries:
            arena = loaded.allocate_state(geometry, device, guard=config.guard)
            pool = StatePool(geometry, total, nulls, device)
            self.groups.append(StateGroup(geometry, arena, loaded.bind_state(geometry, arena), pool))
        pools = [group.pool for group in self.groups]
        guarded = any(group.arena.guarded for group in self.groups)
        self.slots = StateSlots(geometries[0].max_reqs, pools, poison=guarded)
        order = [one.geometry.state for one in self.groups]
        self._homes = [self.groups[order.index(shape)] for shape in shapes]
        self._caches: list[StateCache] = [
            group.pool.layers[list(shapes[:index]).count(shape)]
            for index, (shape, group) in enumerate(zip(shapes, self._homes, strict=True))
        ]
        self._save = torch.zeros(geometries[0].max_reqs, dtype=torch.int32, device=device)
        self._device = device

    @property
    def geometry(self) -> StateGeometry:
        """Geometry of the first group; batch-level formulas are equal in every group."""
        return self.groups[0].geometry

    @property
    def interval(self) -> int:
        """Tokens between checkpoints; 0 for none."""
        return self.geometry.limits.state_interval

    @property
    def pairs(self) -> tuple[tuple[StateBackend, StatePool], ...]:
        """Backend and pool of each group, as `commit_round` takes them."""
        return tuple((group.backend, group.pool) for group in self.groups)

    def plan(self, batch: ForwardBatch) -> None:
        """Run every backend's host-side plan."""
        for group in self.groups:
            group.backend.plan(batch)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write every backend's metadata on the device."""
        for group in self.groups:
            group.backend.write_metadata(batch)

    def fill(self, batch: ForwardBatch, rows: torch.Tensor) -> None:
        """Write the slots of the batch's requests from their rows, int64 ``[R]``. Captured."""
        assert batch.state_slots is not None, "the batch buffers are made with the state geometry"
        torch.index_select(self.slots.device, 0, rows, out=batch.state_slots)

    def save_slots(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the slot that gets the checkpoint of each row, int32 ``[R]``; None without checkpoints. Captured."""
        if not self.interval:
            return None
        return torch.index_select(self.slots.save, 0, rows, out=self._save[: len(rows)])

    def convolve(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Run the short convolution of a layer; see `StateBackend.convolve`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._homes[layer].backend.convolve(x, weight, bias, self._caches[layer], batch, out)
        return out

    def recur(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Run the recurrence of a layer; see `StateBackend.recur`."""
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        self._homes[layer].backend.recur(q, k, v, log_decay, beta, self._caches[layer], batch, out)
        return out

    def resume(self, row: int, checkpoint: int) -> None:
        """Copy a checkpoint's slot to the slot of a row."""
        slot = self.slots.slot_of(row)
        assert slot is not None, f"row {row} has no slot"
        source, target = to_device([[checkpoint], [slot]], self._device)
        for group in self.groups:
            group.pool.copy(source, target)

    def check_guards(self) -> None:
        """Raise `GuardError` if a step wrote past a buffer. Reads the device, and only in guard mode."""
        for group in self.groups:
            if group.arena.guarded:
                group.arena.check()


def state_slots(config: EngineConfig) -> int:
    """Return the slots of requests and checkpoints; null slots are not counted."""
    if config.state_slots is not None:
        return config.state_slots
    return config.max_num_reqs * (4 if config.prefix_cache else 1)


def state_geometries(
    shapes: Sequence[StateShape], loaded: LoadedBackend, config: EngineConfig, device: torch.device
) -> list[StateGeometry]:
    """Return the geometry of each distinct shape, in order of first use.

    Raises:
        GeometryError: a layer has no valid geometry.
        BackendRefusal: the backend does not support a layer.
        RequestError: the configuration's slots or checkpoints do not fit the drafts or the pages.
    """
    if not shapes:
        return []
    _check(config)
    profile, modes = device_profile(device), config.speculation.target_modes
    found = [
        StateGeometry.create(one, config.limits, config.draft_shape, profile, modes, list(shapes).count(one))
        for one in dict.fromkeys(shapes)
    ]
    for geometry in found:
        loaded.require_state(geometry)
    return found


def _check(config: EngineConfig) -> None:
    slots, need = state_slots(config), config.max_num_reqs * (2 if config.prefix_cache else 1)
    if slots < need:
        raise RequestError(
            f"state_slots is {slots}, but {config.max_num_reqs} requests need {need} "
            f"({'a slot and a spare one' if config.prefix_cache else 'one'} each); raise it, or lower max_num_reqs"
        )
    if not config.prefix_cache:
        return
    interval, nodes, page = config.state_interval, config.draft_shape.num_draft_tokens, config.page_size
    fitting = ceil_div(max(interval, 2 * nodes), page) * page
    if interval % page:
        raise RequestError(
            f"state_interval is {interval}, but a checkpoint ends at a whole page of {page} tokens; use a multiple of "
            f"page_size, such as {fitting}"
        )
    # A round in flight must not cross the next multiple while the host has yet to take the slot of the last one.
    if interval < 2 * nodes:
        raise RequestError(
            f"state_interval is {interval}, but two rounds of {nodes} draft tokens may pass two checkpoints; use "
            f"{fitting} or a larger multiple of page_size"
        )
