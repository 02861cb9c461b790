"""Mutants that checks of `state`, `state_graphs`, `state_sizing` kill: slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftmark import StateGeometry
from draftmark.runtime import ForwardBatch, StateCache, StatePool, VerifyResult

from ...designs.masked_states import Masked
from ...designs.state_designs import Columns, StateDesign, View
from ...designs.state_mutants import sized_mutant, state_mutant


class PaddingInSlotOne(Masked):
    """Takes slot 1 for the null slot of a padded request."""

    def slots(self, batch: ForwardBatch) -> Tensor:
        return super().slots(batch).clamp(min=1)


class UnwrittenPadding(Masked):
    """Leaves the outputs of padded rows as they are."""

    def spread(self, values: Tensor, view: View, out: Tensor) -> None:
        total = torch.cat((out, out[:1]))
        total[torch.where(view.valid, view.index, len(out))] = values.to(out.dtype)
        out.copy_(total[:-1])


class WrapsOffsets(Columns):
    """Computes slot · elements in 32 bits."""

    def slots(self, batch: ForwardBatch) -> Tensor:
        numel = max(1, self.geometry.state_numel)
        wrapped = (super().slots(batch) * numel).to(torch.int32).long()
        return (wrapped // numel).clamp(min=0)


class WrapsWindows(Masked):
    """Computes slot · elements of windows in 32 bits."""

    def convolve(self, *args: Any) -> None:
        *_, batch, _ = args
        numel = max(1, self.geometry.conv_numel)
        wrapped = (self.slots(batch) * numel).to(torch.int32).long()
        moved = replace(batch, state_slots=(wrapped // numel).clamp(min=0).to(torch.int32))
        given: Any = (*args[:-2], moved, args[-1])
        super().convolve(*given)


class KeyHeadsByTurns(Columns):
    """Gives head h the key head h modulo the key heads."""

    def inputs(self, q: Tensor, k: Tensor, *rest: Any) -> Any:
        heads, keys = self.shape.num_heads, self.shape.num_key_heads
        order = torch.arange(heads) % keys
        found = super().inputs(q, k, *rest)
        view = rest[-1]
        return (self.by_request(q, view)[:, :, order], self.by_request(k, view)[:, :, order], *found[2:])


class StaleParents(Columns):
    """Copies the parents of the first batch of a size, and not again for a replay."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copies: dict[tuple[Any, ...], Tensor] = {}

    def parents(self, batch: ForwardBatch, index: Tensor, t: Tensor) -> Tensor:
        key = batch.mode, index.shape
        if key not in self.copies:
            self.copies[key] = super().parents(batch, index, t).clone()
        return self.copies[key]


class LiveAtPlan(Masked):
    """Commits the requests that were live when the graph was captured."""

    live = 0

    def plan(self, batch: ForwardBatch) -> None:
        self.live = batch.num_reqs

    def counts(self, accepted: VerifyResult, view: View) -> Tensor:  # type: ignore[override]
        right = StateDesign.counts(accepted, view)
        return torch.where(torch.arange(len(right)) < self.live, right, 0)


class SlotsAtPlan(Columns):
    """Copies the slots of a batch when it is planned, before they reach the device."""

    copied: Tensor | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self.copied = super().slots(batch).clone()

    def slots(self, batch: ForwardBatch) -> Tensor:
        assert self.copied is not None
        return self.copied[: batch.padded_reqs]


class ScratchOfTheProcess(Columns):
    """Keeps the columns in memory of the process, which all opens share."""

    scratch: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def columns(self, cache: StateCache, view: View) -> Tensor:
        whole = self.arena["columns"]
        shared = self.scratch.setdefault(tuple(whole.shape), torch.zeros_like(whole))
        return shared[cache.layer, : len(view.slots)]


class ChecksOnTheHost(Masked):
    """Skips a commit of nothing, which it decides on the host."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        if accepted is None or bool((accepted.accept_lens > 0).any()):
            super().commit(pool, batch, accepted, save_slots)


def _without_padding(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], geometry.limits.max_num_reqs, *shape[2:])


def _of_one_layer(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape[1:])


def _always_rows(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1 + geometry.draft.num_draft_tokens, *shape[3:])


def _by_steps(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], min(shape[2], geometry.draft.num_steps), *shape[3:])


MUTANTS = (
    state_mutant("E21", "Writes padded requests to slot 1", PaddingInSlotOne, "tokenspeed#700"),
    state_mutant("E23", "Leaves padded outputs unwritten", UnwrittenPadding, "sglang#30974"),
    state_mutant("E24", "Wraps slot · elements of states", WrapsOffsets, "sglang#31934"),
    state_mutant("E25", "Wraps slot · elements of windows", WrapsWindows, "mamba#1015"),
    state_mutant("E38", "Gives heads the key heads by turns", KeyHeadsByTurns, "vllm#13660"),
    state_mutant("E39", "Replays with the parents of the capture", StaleParents, "sglang#31099"),
    state_mutant("E40", "Commits the requests of the capture", LiveAtPlan, "vllm#49757"),
    state_mutant("E41", "Reads the slots in plan()", SlotsAtPlan, "vllm#49620"),
    state_mutant("E42", "Shares columns between opens", ScratchOfTheProcess, "vllm#48261"),
    state_mutant("E43", "Reads the accepted counts on the host", ChecksOnTheHost, "sglang#29413"),
    sized_mutant("E44", "Sizes columns without padded requests", Columns, _without_padding, "vllm#36639"),
    sized_mutant("E45", "Sizes records for one layer", Masked, _of_one_layer, "sglang#39624"),
    sized_mutant("E47", "Sizes columns without a verify", Columns, _always_rows, "tokenspeed#397"),
    sized_mutant("E48", "Sizes records by draft steps", Masked, _by_steps, "sglang#34096"),
)
KILLER = {
    **dict.fromkeys(("E21", "E23"), "state.padding_touches_no_slot"),
    **dict.fromkeys(("E24", "E25"), "state.slots_reach_past_int32"),
    "E38": "state.shards_are_the_whole",
    **dict.fromkeys(("E39", "E40"), "state_graphs.replays_follow_their_slots"),
    "E41": "state.plan_does_not_depend_on_device_memory",
    "E42": "state.opens_are_apart",
    "E43": "state.calls_read_no_device_memory",
    **dict.fromkeys(("E44", "E45"), "state_sizing.grows_with_its_rows"),
    "E47": "state_sizing.is_tight",
    "E48": "state_sizing.covers",
}
