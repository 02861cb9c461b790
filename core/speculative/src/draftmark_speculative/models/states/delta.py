"""Delta-rule token mixers: Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692)."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch.nn import functional as F

from draftmark import Gate, Recurrence

from .block import Heads, StateBlock
from .step import StateRun

EPSILON = 1e-6
"""Added to the squared length of q and k before they become unit vectors; the same in transformers and FLA."""


class Projected(NamedTuple):
    """Projections of the rows.

    Attributes:
        channels: q, k and v before the convolution, ``[rows, conv_channels]``.
        gate: of the output, ``[rows, num_heads · value_dim]`` in any shape.
        log_decay: ``[rows, num_heads]`` or ``[rows, num_heads, key_dim]``.
        beta: write strength, ``[rows, num_heads]``.
    """

    channels: torch.Tensor
    gate: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


class DeltaBlock(StateBlock):
    """Project, convolve, normalise q and k, recur, then norm with gate and output projection."""

    recurrence = Recurrence.DELTA

    def __call__(self, hidden: torch.Tensor, step: StateRun, layer: int) -> torch.Tensor:
        """Mix the rows; see `StateBlock`."""
        of, one = self.shape, self.project(hidden)
        keys = of.num_key_heads * of.key_dim
        channels = self.convolve(one.channels, step, layer)
        q, k, v = torch.split(channels, [keys, keys, of.num_heads * of.value_dim], -1)
        rows = len(hidden)
        v = v.reshape(rows, of.num_heads, of.value_dim).contiguous()
        out = step.recur(layer, self._unit(q, of.key_dim**-0.5), self._unit(k), v, one.log_decay, one.beta)
        return self.output(out, one.gate.reshape(out.shape))

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> Projected:
        """Return the projections of the rows."""

    def output(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the block's output of the heads' outputs and gates, ``[rows, num_heads, value_dim]`` each."""
        normed = self.module.norm(out.flatten(0, 1), gate.flatten(0, 1))
        mixed: torch.Tensor = self.module.out_proj(normed.view(len(out), -1))
        return mixed

    def heads(self) -> Heads:
        """Return the heads of the recurrence."""
        one = self.module
        return Heads(one.num_v_heads, one.num_k_heads, one.head_k_dim, one.head_v_dim)

    def _unit(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return unit vectors times `scale`, ``[rows, num_key_heads, key_dim]``, in x's dtype."""
        wide = self.wide(x.reshape(len(x), self.shape.num_key_heads, self.shape.key_dim))
        inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)
        return (wide * (inverse * scale)).to(x.dtype)

    def _log_decay(self, a: torch.Tensor) -> torch.Tensor:
        """Return ``-exp(A_log) · softplus(a + dt_bias)``, ``[rows, num_heads]``."""
        rate = self.wide(self.module.A_log).exp()
        return -rate * F.softplus(self.wide(a) + self.wide(self.module.dt_bias))


class Qwen35Delta(DeltaBlock):
    """Gated DeltaNet of Qwen3.5: four projections, of (q, k, v), output gate, β and decay."""

    def project(self, hidden: torch.Tensor) -> Projected:
        """Return the projections of the rows."""
        one = self.module
        beta = self.wide(one.in_proj_b(hidden).sigmoid())
        log_decay = self._log_decay(one.in_proj_a(hidden))
        return Projected(one.in_proj_qkv(hidden), one.in_proj_z(hidden), log_decay, beta)


class Qwen3NextDelta(DeltaBlock):
    """Gated DeltaNet of Qwen3-Next: two projections, each ordered by key head."""

    def project(self, hidden: torch.Tensor) -> Projected:
        """Return the projections of the rows."""
        one = self.module
        mixed = one.in_proj_qkvz(hidden)[None], one.in_proj_ba(hidden)[None]
        q, k, v, gate, b, a = (part[0] for part in one.fix_query_key_value_ordering(*mixed))
        channels = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
        return Projected(channels, gate, self._log_decay(a), self.wide(b.sigmoid()))


class OlmoDelta(DeltaBlock):
    """Gated DeltaNet of OLMo Hybrid: one projection for each input; β may reach 2."""

    def project(self, hidden: torch.Tensor) -> Projected:
        """Return the projections of the rows."""
        one = self.module
        channels = torch.cat([one.q_proj(hidden), one.k_proj(hidden), one.v_proj(hidden)], -1)
        beta = self.wide(one.b_proj(hidden).sigmoid() * (2.0 if one.allow_neg_eigval else 1.0))
        return Projected(channels, one.g_proj(hidden), self._log_decay(one.a_proj(hidden)), beta)

    def output(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        normed = self.module.o_norm(out.flatten(0, 1), gate.flatten(0, 1))
        mixed: torch.Tensor = self.module.o_proj(normed.view(len(out), -1))
        return mixed


class KimiDelta(DeltaBlock):
    """Kimi Delta Attention: one decay for each key element."""

    gate = Gate.KEY

    def heads(self) -> Heads:
        """Return the heads of the recurrence."""
        one = self.module
        return Heads(one.num_heads, one.num_heads, one.head_dim, one.head_dim)

    def project(self, hidden: torch.Tensor) -> Projected:
        """Return the projections of the rows."""
        one = self.module
        channels = torch.cat([one.q_proj(hidden), one.k_proj(hidden), one.v_proj(hidden)], -1)
        log_decay = self.wide(one.forget_gate(hidden[None])[0])
        beta = self.wide(one.b_proj(hidden).sigmoid())
        return Projected(channels, one.g_b_proj(one.g_a_proj(hidden)), log_decay, beta)

    def output(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        mixed: torch.Tensor = self.module.o_proj(self.module.o_norm(out, gate).flatten(1))
        return mixed
