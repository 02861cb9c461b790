"""Products of small float32 tiles on tensor cores, with the accuracy of float32."""

import triton.language as tl

from .inline import INTERPRETED, inline
from .tile import dot

ROWS = tl.constexpr(16)
"""Rows of a block of a verify."""


@inline
def leading(x):
    """Return float32 numbers cut to the 11 bits that a tf32 product reads."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@inline
def product(a, b, PRECISE: tl.constexpr):
    """Return the matrix product of float32 tiles.

    Args:
        PRECISE: multiply in float32. Otherwise each number is split in two, and three tf32 products hold 22 bits. It is
            Triton's tf32x3 without the handling of infinities, which takes most of its instructions.
    """
    if PRECISE or INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, b_high = leading(a), leading(b)
        found = tl.dot(a - a_high, b_high, input_precision="tf32")
        found = tl.dot(a_high, b - b_high, found, input_precision="tf32")
        return tl.dot(a_high, b_high, found, input_precision="tf32")


@inline
def state_times(held, rows, PARTS: tl.constexpr, PRECISE: tl.constexpr):
    """Return ``held · rowsᵀ``: a state tile ``[BLOCK_V, BLOCK_K]`` in float32 times 16 rows ``[16, BLOCK_K]``.

    Args:
        PARTS: bfloat16 numbers into which each element of the state is split, if the rows are bfloat16. One holds a
            bfloat16 state, and three hold 24 bits, so the products are exact. 0: the rows have another dtype.
    """
    rows = tl.trans(rows)
    if PARTS == 0:
        return product(held, rows.to(tl.float32), PRECISE)
    else:
        found = tl.full((held.shape[0], ROWS), 0, tl.float32)
        for _ in tl.static_range(PARTS):
            # The upper 16 bits are a bfloat16; a conversion that rounds would take a slow instruction.
            bits = held.to(tl.int32, bitcast=True)
            found = dot((bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rows, found)
            held -= (bits & -65536).to(tl.float32, bitcast=True)
        return found
