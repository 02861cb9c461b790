"""Short convolution of LFM2: a gated convolution over few tokens, without a recurrence."""

from __future__ import annotations

import torch
from torch import nn

from draftmark import Recurrence

from .block import Heads, StateBlock
from .step import StateRun


class ShortConvBlock(StateBlock):
    """Project to B, C and x, convolve B · x, multiply by C, and project the output."""

    recurrence = Recurrence.NONE

    def __call__(self, hidden: torch.Tensor, step: StateRun, layer: int) -> torch.Tensor:
        """Mix the rows; see `StateBlock`."""
        b, c, x = self.module.in_proj(hidden).chunk(3, -1)
        mixed: torch.Tensor = self.module.out_proj(c * self.convolve(b * x, step, layer))
        return mixed

    @property
    def convolution(self) -> nn.Conv1d:
        """Depthwise convolution of the module."""
        conv: nn.Conv1d = self.module.conv
        return conv

    def heads(self) -> Heads:
        """Return no heads."""
        return Heads()
