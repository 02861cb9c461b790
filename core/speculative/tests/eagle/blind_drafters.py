"""Mutants OP1 … OP5 of the drafter: it reads another KV, scale, window or position than the head was trained with.

Their author had not read the checks. The text stays right with each of them, so users only lose accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from draftmark import Mode
from draftmark_speculative.eagle import DraftHead
from draftmark_speculative.eagle.drafter import HeadDrafter

TARGETS_HEAD_DIM, TARGETS_WINDOW, TARGETS_SCALE = 16, 8, 4.0
"""Head size of the tiny Llama (the draft head has 12); a window and a K scale of a target."""


@dataclass(frozen=True)
class DrafterMutant:
    """A method or property of the drafter, and what replaces it.

    Attributes:
        id: OP and a number.
        what: one sentence that says what the wrong code does, without a full stop.
        owner, name: the class and its attribute.
        change: original attribute → changed attribute.
    """

    id: str
    what: str
    owner: type
    name: str
    change: Any


def _layers(**fields: Any) -> Any:
    """Return a change of `DraftHead.layers` that gives its layer these fields."""
    return lambda layers: property(lambda self: tuple(replace(one, **fields) for one in layers.fget(self)))


def _positions_by_slot(run: Any) -> Any:
    """Rotate the rows of a draft step by their tail slot, as in a chain; siblings then have different positions."""

    def changed(self: Any, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch = self._layers._batch
        if batch.mode is Mode.DRAFT:
            tail, rows = batch.tail_lens[0], batch.q_lens[0]
            slot = torch.arange(tail - rows, tail, device=positions.device)
            positions = (batch.prefix_lens[:, None] + slot).flatten()
        return run(self, tokens, fused, positions)

    return changed


def _scales_of_target(run: Any) -> Any:
    """Store the head's keys in e4m3 by the target's scale, and read them by the head's own scale, which is 1."""

    def changed(self: Any, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        right = self._attend

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return right(q, (k / TARGETS_SCALE).to(torch.float8_e4m3fn).to(k.dtype), v)

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


DRAFTERS = (
    DrafterMutant("OP1", "Attends with the softmax scale of the target's head size", DraftHead, "layers",
                  _layers(softmax_scale=TARGETS_HEAD_DIM**-0.5)),
    DrafterMutant("OP2", "Attends within the target's window", DraftHead, "layers",
                  _layers(window_left=TARGETS_WINDOW)),
    DrafterMutant("OP3", "Counts positions of drafts by tail slot instead of depth", HeadDrafter, "_run",
                  _positions_by_slot),
    DrafterMutant("OP4", "Stores keys by the target's scale and reads them by its own", HeadDrafter, "_run",
                  _scales_of_target),
    DrafterMutant("OP5", "Overwrites the KV of the newest committed token in draft steps", HeadDrafter, "_gather",
                  _skips_newest),
)  # fmt: skip
