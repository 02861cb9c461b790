"""Narrowing fp32, to the nearest and ties to even, on a GPU and in the interpreter alike.

The interpreter cuts bf16 off, and in e4m3 rounds halves up and drops the carry into the exponent (1.98 becomes 1.0).
There, numbers are first rounded by hand to what the narrow type holds, which its own conversion then keeps.
"""

import triton.language as tl

from .inline import INTERPRETED, inline


@inline
def round_to_bits(x, DROP: tl.constexpr):
    """Round away the lowest DROP bits of an fp32's mantissa."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) << DROP
    return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)


@inline
def convert(x, dtype: tl.constexpr):
    """fp32 to `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        return round_to_bits(x, 16).to(dtype)
    elif INTERPRETED and dtype == tl.float8e4nv:
        # Below 2**-6 e4m3 has a fixed step of 2**-9, which adding and taking away 1.5 · 2**14 rounds to. -0 stays -0.
        size = tl.abs(x)
        small = ((size + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
        return tl.where(size < 0.015625, small.to(tl.float32, bitcast=True), round_to_bits(x, 20)).to(dtype)
    else:
        return x.to(dtype)
