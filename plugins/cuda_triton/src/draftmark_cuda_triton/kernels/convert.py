"""Conversion of fp32 to narrower dtypes: round to nearest, ties to even, on a GPU and in Triton's interpreter.

The interpreter truncates to bf16. For e4m3 it rounds ties up and loses the carry into the exponent (1.98 becomes 1.0).
When interpreted, `convert` therefore first rounds values to values that the narrow dtype represents exactly.
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
    """Convert fp32 to `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        return round_to_bits(x, 16).to(dtype)
    elif INTERPRETED and dtype == tl.float8e4nv:
        # Below 2**-6, e4m3 values are multiples of 2**-9. Adding and then subtracting 1.5 · 2**14 rounds to such a
        # multiple. -0 stays -0.
        size = tl.abs(x)
        small = ((size + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
        return tl.where(size < 0.015625, small.to(tl.float32, bitcast=True), round_to_bits(x, 20)).to(dtype)
    else:
        return x.to(dtype)
