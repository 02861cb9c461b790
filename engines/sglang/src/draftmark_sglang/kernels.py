"""Triton kernels of the adapter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_delta_kernel(
    mixed, a, b, rate, bias, decay, beta, mixed_pitch, a_pitch, b_pitch, heads: tl.constexpr, key_heads: tl.constexpr,
    keys: tl.constexpr, scale: tl.constexpr, epsilon: tl.constexpr, VECTORS: tl.constexpr, KEYS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Normalise a row's queries (to length `scale`) and keys; the first program of a row computes its gates."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    vector, element = group * VECTORS + tl.arange(0, VECTORS), tl.arange(0, KEYS)
    at = mixed + row * mixed_pitch + vector[:, None] * keys + element[None, :]
    inside = (vector < 2 * key_heads)[:, None] & (element < keys)[None, :]
    x = tl.load(at, inside, 0.0).to(tl.float32)
    size = 1.0 / tl.sqrt(tl.sum(x * x, 1) + epsilon)
    size = tl.where(vector < key_heads, size * scale, size)
    tl.store(at, (x * size[:, None]).to(mixed.dtype.element_ty), inside)
    if group == 0:
        head = tl.arange(0, HEADS)
        own = head < heads
        step = tl.load(a + row * a_pitch + head, own, 0.0).to(tl.float32) + tl.load(bias + head, own, 0.0).to(
            tl.float32
        )
        # A large step overflows exp, and softplus is the step itself there.
        soft = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        tl.store(decay + row * heads + head, -tl.exp(tl.load(rate + head, own, 0.0).to(tl.float32)) * soft, own)
        strength = tl.load(b + row * b_pitch + head, own, 0.0).to(tl.float32)
        tl.store(beta + row * heads + head, 1.0 / (1.0 + tl.exp(-strength)), own)
