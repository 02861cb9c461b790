"""Attention and feed-forward parts of the draft head's decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models.elementwise import Elementwise, rotated
from ..models.fused import Packed
from .config import HeadConfig

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention function ``attend(q, k, v) -> out``, each ``[…, rows, heads, head_dim]``; out has q's shape.

In a latent layer, v is None and out is as wide as a value."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions around an `Attend` function."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        frequencies = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        # Negative in the first half, so that sin is negated there: see `rotated`. Not a buffer: `to(dtype)` would
        # round it.
        self.frequencies = torch.cat((-frequencies, frequencies))
        self.num_q, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(size, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, size, bias=False)
        self.packed: Packed | None = None
        self.kernels = Elementwise()

    def pack(self, kernels: Elementwise) -> None:
        """Pack the weights of q, k and v into one matrix product, and use `kernels` for the rotary positions."""
        self.packed, self.kernels = Packed(self.q_proj, self.k_proj, self.v_proj), kernels

    def _apply(self, fn: Any, recurse: bool = True) -> Attention:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = self.frequencies.to(self.q_proj.weight.device)
        return self

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Apply attention, ``[…, rows, hidden_size]`` to an output of equal shape, without the residual.

        Args:
            positions: int64 ``[…, rows]`` or ``[rows]``.
        """
        heads = self._heads(x)
        cos, sin = self._angles(positions, x.dtype)
        q, k = self.kernels.rotated(heads, self.num_q, self.num_kv, cos, sin)
        out: torch.Tensor = self.o_proj(attend(q, k, heads[..., self.num_q + self.num_kv :, :]).flatten(-2))
        return out

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, with rotary positions, and values of rows without queries: ``[rows, num_kv, head_dim]`` each.

        Args:
            x: ``[rows, hidden_size]``.
            positions: int64 ``[rows]``.
        """
        k, v = (proj(x).view(len(x), self.num_kv, self.head_dim) for proj in (self.k_proj, self.v_proj))
        return rotated(k, 0, self.num_kv, *self._angles(positions, x.dtype))[1], v

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None, None] * self.frequencies
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return q, k and v, concatenated over heads: ``[…, rows, all heads, head_dim]``."""
        if self.packed is not None:
            side_by_side = self.packed(x)
        else:
            side_by_side = torch.cat([proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)], -1)
        return side_by_side.view(*x.shape[:-1], -1, self.head_dim)


class SwiGLU(nn.Module):
    """Feed-forward part of a decoder layer."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.packed: Packed | None = None
        self.kernels = Elementwise()

    def pack(self, kernels: Elementwise) -> None:
        """Pack the weights of gate and up into one matrix product, and use `kernels` for the activation."""
        self.packed, self.kernels = Packed(self.gate_proj, self.up_proj), kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward part, ``[…, size]`` to an output of equal shape, without the residual."""
        if self.packed is not None:
            let_through = self.kernels.swiglu(self.packed(x))
        else:
            let_through = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        out: torch.Tensor = self.down_proj(let_through)
        return out


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
    """Attend causally over ``[…, rows, heads, head_dim]``; an `Attend` for training."""
    assert v is not None, "a draft head has keys and values"
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(-3, -2)
