"""Triton kernel for a forward with one row: a matrix product of a decoder layer, fused with its neighbors.

One row reads each weight once, so a launch is bound by the weights' bytes: 48 MiB of q, k and v of Llama-3-8B take
12 µs at 4.3 TB/s. The kernel also computes the RMSNorm of its input, and adds its result to the residual, or applies
SwiGLU or rotary positions. So a layer has four launches besides attention and its KV store.

A launch starts while the one before it still runs (programmatic dependent launch, sm_90 and newer). It loads its first
weights, and only then waits for the input. In a small model this hides most of a launch.

    weight   [N, K]  each program reads BLOCK_N rows, or BLOCK_N pairs of rows, BLOCK_K elements at a time
    x        [K]     every program reads it, from L2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from .rotary import Rotary


@triton.jit
def _row_product(
    x, norm, weight, bias, cos, sin, out, eps, N, turned, K: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Compute ``out = f(norm(x) @ weight.T + bias)`` for one row.

    GATED: weight has 2·N rows, gates first, and out is silu(gate) · up. ADD: out is added to what it holds.
    HALF above 0: outputs are heads of 2·HALF elements and N counts pairs (d, d + HALF); the first `turned` pairs are
    rotated by cos and sin.
    """
    PAIRS: tl.constexpr = GATED or HALF > 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    row = columns
    distance = N
    if HALF > 0:
        row = columns // HALF * (2 * HALF) + columns % HALF
        distance = HALF
    place = row.to(tl.int64)[:, None] * K
    other = place + distance * K
    at = tl.arange(0, BLOCK_K)[None, :]
    own = tl.load(weight + place + at, mask=inside[:, None] & (at < K), other=0.0)
    if PAIRS:
        paired = tl.load(weight + other + at, mask=inside[:, None] & (at < K), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # weights never change; x and out are read and written after this line

    scale = 1.0
    if NORM:
        whole = tl.arange(0, WHOLE_K)
        values = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values) / K + eps)
    first = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        here = start + tl.arange(0, BLOCK_K)
        value = tl.load(x + here, mask=here < K, other=0.0)
        if NORM:
            factor = tl.load(norm + here, mask=here < K, other=0.0)
            # The product reads a norm in the dtype of x, as after a launch of its own.
            value = (value.to(tl.float32) * scale * factor.to(tl.float32)).to(value.dtype)
        value = value.to(tl.float32)[None, :]
        first += own.to(tl.float32) * value
        next_at = here[None, :] + BLOCK_K
        own = tl.load(weight + place + next_at, mask=inside[:, None] & (next_at < K), other=0.0)
        if PAIRS:
            second += paired.to(tl.float32) * value
            paired = tl.load(weight + other + next_at, mask=inside[:, None] & (next_at < K), other=0.0)
    result = tl.sum(first, 1)
    if BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    if PAIRS:
        partner = tl.sum(second, 1)
        if BIAS:
            partner += tl.load(bias + row + distance, mask=inside, other=0.0).to(tl.float32)
        # Both are rounded, as tensors between launches are.
        result = result.to(kind).to(tl.float32)
        partner = partner.to(kind).to(tl.float32)
    if GATED:
        result = (result * tl.sigmoid(result)).to(kind).to(tl.float32) * partner
    if HALF > 0:
        angle = columns % HALF
        rotates = inside & (columns < turned)
        near = tl.load(cos + angle, mask=rotates, other=1.0).to(tl.float32)
        far = tl.load(cos + angle + HALF, mask=rotates, other=1.0).to(tl.float32)
        near_sin = tl.load(sin + angle, mask=rotates, other=0.0).to(tl.float32)
        far_sin = tl.load(sin + angle + HALF, mask=rotates, other=0.0).to(tl.float32)
        tl.store(out + row, (result * near + partner * near_sin).to(kind), mask=inside)
        tl.store(out + row + HALF, (partner * far + result * far_sin).to(kind), mask=inside)
    else:
        if ADD:
            result += tl.load(out + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row, result.to(kind), mask=inside)


@dataclass(frozen=True)
class Tile:
    """Launch parameters of `row_product`: outputs of a program, elements of a row that it reads at a time, warps."""

    columns: int = 4
    elements: int = 1024
    warps: int = 4


def tile_of(elements: int) -> Tile:
    """Return the tile for a weight with this many elements a row: fewer outputs if one read covers a row."""
    return Tile(2, 1024, 2) if elements <= 1024 else Tile()


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    gated: bool = False,
    rotary: Rotary | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute a linear layer of one row into `out`, and return it. Capturable.

    Args:
        x: ``[1, K]``, contiguous. weight: ``[N, K]``, or ``[2 · N, K]`` with gates first if `gated`. bias: ``[N]``,
            ``[2 · N]`` if `gated`. out: ``[1, N]``, contiguous. All have one dtype.
        norm, eps: weight ``[K]`` and epsilon of an RMSNorm of x; None for none.
        add: add the result to `out` instead of replacing it.
        gated: apply SwiGLU: silu(gate) · up.
        rotary: rotary positions of heads of the result; None for none. Without `add` and `gated`.
        tile: launch parameters; None for `tile_of`.
    """
    columns, elements = out.shape[-1], weight.shape[1]
    tile = tile or tile_of(elements)
    block = min(tile.elements, triton.next_power_of_2(elements))
    cos, sin, half, turned = x, x, 0, 0
    if rotary is not None:
        cos, sin, half = rotary.cos, rotary.sin, rotary.cos.numel() // 2
        columns, turned = columns // 2, rotary.heads * half
    overlaps = _overlaps(x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device, which may be another one
        _row_product[(triton.cdiv(columns, tile.columns),)](
            x, x if norm is None else norm, weight, x if bias is None else bias, cos, sin, out, eps, columns, turned,
            elements, half, NORM=norm is not None, BIAS=bias is not None, ADD=add, GATED=gated, PDL=overlaps,
            BLOCK_N=tile.columns, BLOCK_K=block, WHOLE_K=triton.next_power_of_2(elements), num_warps=tile.warps,
            **({"launch_pdl": True} if overlaps else {}),
        )  # fmt: skip
    return out


@cache
def _overlaps(device: torch.device) -> bool:
    """Return True for a device with programmatic dependent launch: a kernel starts while the one before it runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
