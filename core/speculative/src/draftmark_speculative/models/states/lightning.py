"""Lightning attention of MiniMax (arXiv:2501.08313): linear attention with one constant decay per head."""

from __future__ import annotations

import torch

from draftmark import Gate, Recurrence

from .block import Heads, StateBlock
from .step import StateRun


class MiniMaxLightning(StateBlock):
    """Project to q, k and v with an activation, recur, norm, gate, and project the output. There is no convolution."""

    recurrence = Recurrence.DECAY
    gate = Gate.CONSTANT
    returns_pair = True
    convolution = None

    def __call__(self, hidden: torch.Tensor, step: StateRun, layer: int) -> torch.Tensor:
        """Mix the rows; see `StateBlock`."""
        one, of = self.module, self.shape
        heads = one.act_fn(one.qkv_proj(hidden)).view(len(hidden), of.num_heads, -1)
        q, k, v = (part.contiguous() for part in heads.split([of.key_dim, of.key_dim, of.value_dim], -1))
        out = step.recur(layer, q, k, v, -self.wide(one.slope_rate).flatten(), None)
        mixed: torch.Tensor = one.out_proj(one.output_gate(hidden).sigmoid() * one.norm(out.flatten(1)))
        return mixed

    def heads(self) -> Heads:
        """Return the heads of the recurrence."""
        one = self.module
        return Heads(one.num_attention_heads, one.num_attention_heads, one.head_dim, one.head_dim)
