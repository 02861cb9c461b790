"""Mutants that checks of `state` kill: roundings of operands to 16 bits or fewer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draftmark.runtime import ForwardBatch

from ...designs.masked_states import Masked
from ...designs.state_designs import LEAVES_STATE, Columns, View
from ...designs.state_mutants import state_mutant


class RoundsEveryMode(Masked):
    """Rounds the state before every row to bfloat16, if the layer lets prompts round."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    rounding = False

    def rounds(self, batch: ForwardBatch) -> bool:
        """Return True if rows of the batch are rounded."""
        return self.shape.round_prompts

    def recur(self, *args: Any) -> None:
        *_, batch, _ = args
        self.rounding = self.rounds(batch)
        super().recur(*args)

    def first(self, slots: Tensor, view: View) -> Tensor:
        found = super().first(slots, view)
        return found.to(self.dtype).to(found.dtype) if self.rounding and found.dim() == 4 else found


class RoundsToEightBits(RoundsEveryMode):
    """Rounds the state before a prompt to 8 bits, if the layer allows 16."""

    dtype = torch.float8_e5m2

    def rounds(self, batch: ForwardBatch) -> bool:
        return self.shape.round_prompts and batch.mode in LEAVES_STATE and max(batch.q_lens) > 1


class RoundsUnasked(Columns):
    """Rounds the state of a prompt after each row to the activations' dtype, though the layer does not allow it."""

    def step(self, before: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        found = super().step(before, k, v, decay, strength)
        return found.to(getattr(torch, self.shape.dtype)).to(found.dtype)


MUTANTS = (
    state_mutant("E64", "Rounds states in every mode if prompts may round", RoundsEveryMode),
    state_mutant("E65", "Rounds prompts to 8 bits", RoundsToEightBits),
    state_mutant("E66", "Rounds states of prompts that may not round", RoundsUnasked),
)
KILLER = {**dict.fromkeys(("E64", "E65"), "state.only_prompts_round"), "E66": "state.a_crowd_is_right"}
