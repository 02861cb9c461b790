"""Mamba2 token mixers (arXiv:2405.21060): Mamba2, Granite 4, Nemotron-H and Falcon-H1."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from draftmark import Recurrence

from .block import Heads, StateBlock
from .step import StateRun


class Mamba2Block(StateBlock):
    """Project, convolve, recur, add the skip D · x, then norm with gate and output projection.

    In the form of `StateRun.recur`, C is the query, B the key, and x times the time step the value.
    The time step is limited in every row. transformers does not limit it in forwards of one row.
    """

    recurrence = Recurrence.DECAY

    def __call__(self, hidden: torch.Tensor, step: StateRun, layer: int) -> torch.Tensor:
        """Mix the rows; see `StateBlock`."""
        one, of, rows = self.module, self.shape, len(hidden)
        inner, keys = of.num_heads * of.value_dim, of.num_key_heads * of.key_dim
        gate, channels, dt = torch.split(self.project(hidden), [inner, of.conv_channels, of.num_heads], -1)
        x, b, c = torch.split(self.convolve(channels, step, layer), [inner, keys, keys], -1)
        x = x.reshape(rows, of.num_heads, of.value_dim)
        b, c = (part.reshape(rows, of.num_key_heads, of.key_dim).contiguous() for part in (b, c))
        dt = F.softplus(self.wide(dt) + self.wide(one.dt_bias)).clamp(*one.time_step_limit)
        scaled = (dt[..., None] * self.wide(x)).to(x.dtype)
        out = step.recur(layer, c, b, scaled, -self.wide(one.A_log).exp() * dt, None)
        out = torch.addcmul(self.wide(out), self.wide(one.D)[:, None], self.wide(x))
        return self.output(out.flatten(1), gate)

    @property
    def decodes_alike(self) -> bool:
        """True if no limit can change a time step."""
        least, most = self.module.time_step_limit
        return least <= 0 and math.isinf(most)

    def heads(self) -> Heads:
        """Return the heads of the recurrence."""
        one = self.module
        return Heads(one.num_heads, one.n_groups, one.ssm_state_size, one.head_dim)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return gate, channels and time steps, side by side."""
        projected: torch.Tensor = self.module.in_proj(hidden)
        return projected

    def output(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the block's output of the heads' outputs, ``[rows, num_heads · value_dim]``, in the gate's dtype."""
        mixed: torch.Tensor = self.module.out_proj(self.module.norm(out, gate).to(gate.dtype))
        return mixed


class FalconH1Mamba2(Mamba2Block):
    """Mamba2 of Falcon-H1: multipliers around the projection, and an optional norm."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return gate, channels and time steps, side by side."""
        projected = self.module.in_proj(hidden * self.module.ssm_in_multiplier)
        scaled: torch.Tensor = projected * self.module.mup_vector[0]
        return scaled.to(hidden.dtype)  # the vector may stay float32

    def output(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        if self.module.mamba_rms_norm:
            return super().output(out, gate)
        mixed: torch.Tensor = self.module.out_proj((out * F.silu(gate)).to(gate.dtype))
        return mixed
