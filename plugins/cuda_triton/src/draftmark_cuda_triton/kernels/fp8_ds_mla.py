"""Tiles of latent rows of 656 bytes (`FP8_DS_MLA`): each 128 e4m3 numbers of a value have a scale.

    byte 0      128      256      384      512           528                656
         | e_0    | e_1    | e_2    | e_3    | s_0 … s_3   | rest, bf16       |

The scales stay in fp32 outside of the operands, so no product has a rounded operand that plain rows do not have:

    s     = q_rest · restᵀ + Σ_b (q_b · e_bᵀ) · s_b         a scale is a factor of one key's logits
    out_b = (p · s_b) · e_b                                 p · s_b is rounded to q's dtype once, as p is for plain rows

Numbers and scales are loaded once for both products. Bytes: 656 for each key, 0.57 of a row of bf16.
"""

import triton.language as tl

from .convert import convert
from .inline import inline
from .softmax import tile_weights
from .tile import dot, load_queries

BLOCK = tl.constexpr(128)
"""Numbers that share a scale."""


@inline
def load_row_queries(rows, live):
    """Load the queries of packed rows: those of the four blocks, then those of the rest."""
    return (
        load_queries(rows, live, 0, BLOCK, BLOCK),
        load_queries(rows, live, BLOCK, BLOCK, BLOCK),
        load_queries(rows, live, 2 * BLOCK, BLOCK, BLOCK),
        load_queries(rows, live, 3 * BLOCK, BLOCK, BLOCK),
        load_queries(rows, live, 4 * BLOCK, 64, 64),
    )


@inline
def load_block(data, rows, live, B: tl.constexpr, MASKED: tl.constexpr):
    """Load block B of rows at byte offsets `rows`: e4m3 ``[BLOCK_N, 128]`` and fp32 scales ``[BLOCK_N]``.

    With MASKED both are zero where not `live`: a scale that was never written may be NaN.
    """
    numbers = data + rows[:, None] + (tl.arange(0, BLOCK) + B * BLOCK)[None, :]
    scales = (data + 4 * BLOCK).to(tl.pointer_type(tl.float32), bitcast=True) + (rows >> 2) + B
    if MASKED:
        return tl.load(numbers, mask=live[:, None], other=0.0), tl.load(scales, mask=live, other=0.0)
    else:
        return tl.load(numbers), tl.load(scales)


@inline
def load_rest(data, rows, live, MASKED: tl.constexpr):
    """Load the rests of rows at byte offsets `rows`: bf16 ``[BLOCK_N, 64]``; zeros where not `live` with MASKED."""
    pointers = (data + 4 * BLOCK + 16).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    pointers = pointers + (rows >> 1)[:, None] + tl.arange(0, 64)[None, :]
    if MASKED:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    else:
        return tl.load(pointers)


@inline
def load_rows(data, rows, live, MASKED: tl.constexpr):
    """Load a tile of rows at byte offsets `rows`: numbers and scales of each block, then the rests."""
    return (
        load_block(data, rows, live, 0, MASKED),
        load_block(data, rows, live, 1, MASKED),
        load_block(data, rows, live, 2, MASKED),
        load_block(data, rows, live, 3, MASKED),
        load_rest(data, rows, live, MASKED),
    )


@inline
def block_logits(q, block):
    """Return the part of the logits that one block of the rows adds."""
    numbers, scales = block
    zero = tl.full([q.shape[0], numbers.shape[0]], 0.0, tl.float32)
    return dot(q, tl.trans(numbers.to(q.dtype)), zero) * scales[None, :]


@inline
def row_logits(queries, tile):
    """Return ``q · rowᵀ`` in fp32, ``[BLOCK_M, BLOCK_N]``; arguments of `load_row_queries` and `load_rows`."""
    q_0, q_1, q_2, q_3, q_rest = queries
    block_0, block_1, block_2, block_3, rest = tile
    zero = tl.full([q_rest.shape[0], rest.shape[0]], 0.0, tl.float32)
    s = dot(q_rest, tl.trans(rest.to(q_rest.dtype)), zero)
    s += block_logits(q_0, block_0)
    s += block_logits(q_1, block_1)
    s += block_logits(q_2, block_2)
    return s + block_logits(q_3, block_3)


@inline
def add_block(acc, p, fade, block, dtype: tl.constexpr):
    """Return the accumulator of one block after a tile with softmax probabilities p."""
    numbers, scales = block
    return dot(convert(p * scales[None, :], dtype), numbers, acc * fade[:, None])


@inline
def empty_state(BLOCK_M: tl.constexpr):
    """Return the state of a row tile without keys: the accumulators of the four blocks, row_max and row_sum."""
    acc = tl.full([BLOCK_M, BLOCK], 0.0, tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return acc, acc, acc, acc, row_max, tl.full([BLOCK_M], 0.0, tl.float32)


@inline
def add_rows(state, s, tile, unit, dtype: tl.constexpr, MASKED: tl.constexpr):
    """Add a tile of rows to the state of a row tile; arguments as in `softmax.add_tile`."""
    acc_0, acc_1, acc_2, acc_3, row_max, row_sum = state
    block_0, block_1, block_2, block_3, _ = tile
    p, fade, row_max, row_sum = tile_weights(row_max, row_sum, s, unit, MASKED)
    acc_0 = add_block(acc_0, p, fade, block_0, dtype)
    acc_1 = add_block(acc_1, p, fade, block_1, dtype)
    acc_2 = add_block(acc_2, p, fade, block_2, dtype)
    acc_3 = add_block(acc_3, p, fade, block_3, dtype)
    return acc_0, acc_1, acc_2, acc_3, row_max, row_sum


@inline
def joined_state(state):
    """Return acc ``[BLOCK_M, 512]``, row_max and row_sum."""
    acc_0, acc_1, acc_2, acc_3, row_max, row_sum = state
    # The last two axes are the two bits of the block, the higher bit first.
    blocks = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3))
    return tl.reshape(tl.permute(blocks, (0, 2, 3, 1)), (acc_0.shape[0], 4 * BLOCK)), row_max, row_sum
