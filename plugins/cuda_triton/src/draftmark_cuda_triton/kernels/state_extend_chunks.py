"""Parts that the kernels of EXTEND share: chunks of a ragged batch, gates in a chunk, and products.

A chunk is up to CHUNK rows of one request. Chunk c of request r has the number ``q_indptr[r] // CHUNK + r + c``. These
numbers are distinct and increase with r, so a program finds its chunk from q_indptr and no host length is needed. Some
numbers below ``num_rows // CHUNK + R`` have no chunk.
"""

import triton.language as tl

from .inline import INTERPRETED, bound, inline
from .reduce import total

CHUNK = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)


@inline
def first_chunk(q_indptr, request):
    """Return the number of a request's first chunk."""
    return tl.load(q_indptr + request) // CHUNK + request


@inline
def find_chunk(q_indptr, num_requests, chunk, BLOCK: tl.constexpr):
    """Return the first row of a chunk and the end of its request's rows; a number without a chunk is at or past it."""
    before = 0
    for start in range(0, bound(num_requests), BLOCK):
        request = start + tl.arange(0, BLOCK)
        first = first_chunk(q_indptr, tl.minimum(request, num_requests - 1))
        before += total(((request < num_requests) & (first <= chunk)).to(tl.int32), 0)
    request = before - 1
    row = tl.load(q_indptr + request) + (chunk - first_chunk(q_indptr, request)) * CHUNK
    return row, tl.load(q_indptr + request + 1)


@inline
def product(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a @ b`` in float32; PRECISION is for float32 operands."""
    if INTERPRETED:
        # The interpreter keeps bfloat16 as uint16 and would multiply the bit patterns.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@inline
def load_rows(base, rows, live, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows of one head ``[rows, BLOCK]``: zeros in dead rows and past DIM."""
    column = tl.arange(0, BLOCK)
    mask = live[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@inline
def in_lower_left(row, column, LEVEL: tl.constexpr):
    """Return where elements below the diagonal lie in the lower left quarter of a diagonal block of 2**(LEVEL + 1)."""
    return (row >> (LEVEL + 1) == column >> (LEVEL + 1)) & (row >> LEVEL != column >> LEVEL)


@inline
def invert_unit_lower(a, PRECISION: tl.constexpr):
    """Return the inverse of I + a for a strictly lower triangular float32 `a` ``[CHUNK, CHUNK]``.

    The inverse of a matrix of two blocks follows from those of its diagonal blocks: ``-T1 · A10 · T0`` is its lower
    left block. Blocks double from 1 to CHUNK. The first levels run on the four diagonal blocks of 16 at once.
    """
    block_row = tl.arange(0, 4)[:, None, None, None]
    block_column = tl.arange(0, 4)[None, None, :, None]
    diagonal = total(tl.where(block_row == block_column, tl.reshape(a, (4, 16, 4, 16)), 0.0), 2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -diagonal, 0.0))
    for level in tl.static_range(1, 4):
        below = tl.where(in_lower_left(row, column, level), diagonal, 0.0)
        step = tl.dot(inverse, below, input_precision=PRECISION)
        inverse -= tl.dot(step, inverse, input_precision=PRECISION)
    inverse = tl.reshape(tl.where(block_row == block_column, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK))
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    for level in tl.static_range(4, 6):
        below = tl.where(in_lower_left(row, column, level), a, 0.0)
        step = tl.dot(inverse, below, input_precision=PRECISION)
        inverse -= tl.dot(step, inverse, input_precision=PRECISION)
    return inverse
