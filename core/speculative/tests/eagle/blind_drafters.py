"""Mutants OP1 … OP5 of the drafter: it reads another KV, scale, window or position than the head was trained with.

Their author had not read the checks. The text stays right with each of them, so users only lose accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from core.speculative.tests.judging.test_judge_drafter import OtherShape
from draftmark import Mode
from draftmark.runtime import ForwardBatch
from draftmark_speculative.eagle import DraftHead
from draftmark_speculative.eagle.drafter import HeadDrafter
from draftmark_speculative.judging import DraftAttention

TARGETS_HEAD_DIM, HEADS_HEAD_DIM, TARGETS_WINDOW, TARGETS_SCALE = 16, 12, 8, 4.0
"""Head sizes of the tiny Llama and of the draft head; a window and a K scale of a target."""


@dataclass(frozen=True)
class DrafterMutant:
    """A method or property of the drafter, and what replaces it.

    Attributes:
        id: OP and a number.
        what: one sentence that says what the wrong code does, without a full stop.
        owner, name: the class and its attribute.
        change: original attribute → changed attribute.
        imitation: attention with the same defect, for a target that drafts for itself.
        difference: what `judge_drafter` must name in trees.
    """

    id: str
    what: str
    owner: type
    name: str
    change: Any
    imitation: type[DraftAttention]
    difference: str


def _layers(**fields: Any) -> Any:
    """Return a change of `DraftHead.layers` that gives its layer these fields."""
    return lambda layers: property(lambda self: tuple(replace(one, **fields) for one in layers.fget(self)))


def _positions_by_slot(run: Any) -> Any:
    """Rotate the rows of a draft step by their tail slot, as in a chain; siblings then have different positions."""

    def changed(self: Any, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch = self._layers._batch
        if batch.mode is Mode.DRAFT:
            positions = _slot_positions(batch, positions.device)
        return run(self, tokens, fused, positions)

    return changed


def _slot_positions(batch: ForwardBatch, device: torch.device) -> torch.Tensor:
    tail, rows = batch.tail_lens[0], batch.q_lens[0]
    return (batch.prefix_lens[:, None] + torch.arange(tail - rows, tail, device=device)).long().flatten()


def _by_targets_scale(k: torch.Tensor) -> torch.Tensor:
    return (k / TARGETS_SCALE).to(torch.float8_e4m3fn).to(k.dtype)


def _scales_of_target(run: Any) -> Any:
    """Store the head's keys in e4m3 by the target's scale, and read them by the head's own scale, which is 1."""

    def changed(self: Any, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        right = self._attend

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return right(q, _by_targets_scale(k), v)

        self._attend = attend
        hidden = run(self, tokens, fused, positions)
        self._attend = right
        return hidden

    return changed


def _skips_newest(gather: Any) -> Any:
    """Give draft steps a length that is one too small, so that they overwrite the newest committed token's KV."""

    def changed(self: Any, batch: Any, prefix_lens: torch.Tensor) -> None:
        draft = batch.mode is Mode.DRAFT
        gather(self, batch, (prefix_lens - 1).clamp(min=0) if draft else prefix_lens)

    return changed


class ScaleOfHead(OtherShape):
    """OP1 in a target that drafts for itself: it takes the scale of the other model's head size."""

    change = {"softmax_scale": lambda shape: HEADS_HEAD_DIM**-0.5}  # noqa: RUF012


class OtherWindow(OtherShape):
    """OP2 in a target without a window."""

    change = {"window_left": lambda shape: TARGETS_WINDOW}  # noqa: RUF012


class SlotPositions(DraftAttention):
    """OP3: the position of a row is the prefix length plus its tail slot. In a chain this is the right position."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the positions of the tail slots."""
        return _slot_positions(batch, batch.prefix_lens.device)


class KeysByTargetsScale(DraftAttention):
    """OP4: stored keys are a quarter of what the drafter reads them as."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store the keys in e4m3 by the target's scale, and attend."""
        return super().attend(layer, q, _by_targets_scale(k), v)


class ShortLengths(DraftAttention):
    """OP5: draft steps get a length that is one too small, so the tail's positions are one too small as well."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the positions that follow from the short lengths."""
        return (batch.positions - 1).clamp(min=0)

    def begin(self, batch: ForwardBatch) -> None:
        """Plan and begin with the short lengths."""
        batch.prefix_lens.sub_(1).clamp_(min=0)
        super().begin(batch)


DRAFTERS = (
    DrafterMutant("OP1", "Attends with the softmax scale of the target's head size", DraftHead, "layers",
                  _layers(softmax_scale=TARGETS_HEAD_DIM**-0.5), ScaleOfHead, "scale"),
    DrafterMutant("OP2", "Attends within the target's window", DraftHead, "layers",
                  _layers(window_left=TARGETS_WINDOW), OtherWindow, "window"),
    DrafterMutant("OP3", "Counts positions of drafts by tail slot instead of depth", HeadDrafter, "_run",
                  _positions_by_slot, SlotPositions, "position"),
    DrafterMutant("OP4", "Stores keys by the target's scale and reads them by its own", HeadDrafter, "_run",
                  _scales_of_target, KeysByTargetsScale, "KV"),
    DrafterMutant("OP5", "Overwrites the KV of the newest committed token in draft steps", HeadDrafter, "_gather",
                  _skips_newest, ShortLengths, "position"),
)  # fmt: skip
