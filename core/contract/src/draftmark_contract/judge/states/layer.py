"""Layers with recurrent state: their weights, their rows, and the outputs that the oracle gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.nn import functional

from draftmark import Gate, Recurrence, StateShape

from ...oracle.state import SequentialState

NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys, as in flash-linear-attention."""


class Family(StrEnum):
    """Kinds of layers."""

    GDN = "gdn"
    """Gated DeltaNet: a delta rule, one decay per head (Qwen3-Next, Qwen3.5)."""
    KDA = "kda"
    """Kimi Delta Attention: a delta rule, one decay per head and key element."""
    MAMBA2 = "mamba2"
    """Mamba2: no delta rule, one decay per head, and the input added to the output (Nemotron-H, Falcon-H1)."""


@dataclass(frozen=True)
class Layer:
    """One layer to judge.

    Attributes:
        name: short name for item ids.
        family: kind of the layer.
        shape: its shape. The projection's channels are q, k, v; of Mamba2 x, B, C.
        conv_bias: True if the convolution has a bias.
    """

    name: str
    family: Family
    shape: StateShape
    conv_bias: bool = False

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of the three parts of the projection, in the order in which engines store them."""
        s = self.shape
        keys, values = s.num_key_heads * s.key_dim, s.num_heads * s.value_dim
        return (values, keys, keys) if self.family is Family.MAMBA2 else (keys, keys, values)

    @property
    def window(self) -> int:
        """Earlier rows that the convolution reads."""
        return self.shape.conv_kernel - 1

    @property
    def delta(self) -> bool:
        """True for a delta rule, False for decay only."""
        return self.shape.recurrence is Recurrence.DELTA


def layer_of(
    name: str,
    family: Family,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: str,
    conv_bias: bool = False,
) -> Layer:
    """Return a layer with a convolution of four taps and float32 states.

    Args:
        name, family, conv_bias: see `Layer`.
        heads: heads of values, and of keys (Mamba2: groups).
        dims: elements of a key and of a value in one head.
        dtype: dtype of rows and windows.
    """
    (num_heads, num_key_heads), (key_dim, value_dim) = heads, dims
    shape = StateShape(
        recurrence=Recurrence.DECAY if family is Family.MAMBA2 else Recurrence.DELTA,
        gate=Gate.KEY if family is Family.KDA else Gate.HEAD,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_channels=2 * num_key_heads * key_dim + num_heads * value_dim,
        conv_kernel=4,
        dtype=dtype,
        conv_dtype=dtype,
    )
    return Layer(name, family, shape, conv_bias)


@dataclass(frozen=True)
class Weights:
    """Weights of a layer, in the dtype that engines keep.

    Attributes:
        conv: ``[channels, kernel]``. bias: ``[channels]`` or None.
        a_log: float32 ``[heads]``; the decay is ``exp(-exp(a_log) · softplus(gate + dt_bias))``.
        dt_bias: float32 ``[heads]``, of KDA ``[heads, key_dim]``.
        skip: float32 ``[heads]``, factor of the input in Mamba2's output.
    """

    conv: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Inputs of a round's rows, after the projection.

    Attributes:
        x: input of the convolution, ``[rows, channels]``.
        gate: input of the decay, ``[rows, heads]``, of KDA ``[rows, heads, key_dim]``.
        b: input of beta before the sigmoid, ``[rows, heads]``. Mamba2 ignores it.
    """

    x: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor

    def part(self, start: int, end: int) -> Rows:
        """Return rows start to end."""
        return Rows(self.x[start:end], self.gate[start:end], self.b[start:end])


def weights_of(layer: Layer, seed: int) -> Weights:
    """Draw weights. Decays lie near 0.9, so that rows from long ago remain visible in a state."""
    make, s, dtype = torch.Generator().manual_seed(seed), layer.shape, getattr(torch, layer.shape.dtype)
    conv = torch.randn(s.conv_channels, s.conv_kernel, generator=make) * 0.5
    bias = torch.randn(s.conv_channels, generator=make) * 0.3 if layer.conv_bias else None
    return Weights(
        conv.to(dtype),
        None if bias is None else bias.to(dtype),
        torch.rand(s.num_heads, generator=make) - 2.5,
        torch.randn(s.num_heads, *_per_key(layer), generator=make) * 0.3,
        torch.randn(s.num_heads, generator=make),
    )


def rows_of(layer: Layer, count: int, seed: int) -> Rows:
    """Draw the inputs of rows."""
    make, s, dtype = torch.Generator().manual_seed(seed), layer.shape, getattr(torch, layer.shape.dtype)
    return Rows(
        torch.randn(count, s.conv_channels, generator=make).to(dtype),
        torch.randn(count, s.num_heads, *_per_key(layer), generator=make).to(dtype),
        torch.randn(count, s.num_heads, generator=make).to(dtype),
    )


def outputs_of(
    layer: Layer, weights: Weights, oracle: SequentialState, rows: Rows, parents: Sequence[int]
) -> torch.Tensor:
    """Return the right outputs of one request's rows, float64 ``[rows, heads, value_dim]``."""
    s = layer.shape
    mixed = oracle.convolve(rows.x, parents, weights.conv, weights.bias)
    first, second, third = torch.split(mixed, list(layer.widths), -1)
    step = functional.softplus(rows.gate.double() + weights.dt_bias.double())
    rate = -weights.a_log.double().exp()
    if layer.family is Family.MAMBA2:
        x = first.view(-1, s.num_heads, s.value_dim)
        k, q = (one.view(-1, s.num_key_heads, s.key_dim) for one in (second, third))
        out = oracle.recur(q, k, x * step[..., None], step * rate, None, parents)
        added: torch.Tensor = x * weights.skip.double()[:, None]
        return out + added
    q, k = (_unit(one.view(-1, s.num_key_heads, s.key_dim)) for one in (first, second))
    v = third.view(-1, s.num_heads, s.value_dim)
    decay = step * (rate[:, None] if layer.family is Family.KDA else rate)
    return oracle.recur(q * s.key_dim**-0.5, k, v, decay, rows.b.double().sigmoid(), parents)


def _per_key(layer: Layer) -> tuple[int, ...]:
    return (layer.shape.key_dim,) if layer.family is Family.KDA else ()


def _unit(x: torch.Tensor) -> torch.Tensor:
    length: torch.Tensor = (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    return x / length
