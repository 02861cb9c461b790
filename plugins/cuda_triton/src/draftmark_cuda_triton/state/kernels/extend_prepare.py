"""Kernels that prepare the chunks of EXTEND for the delta rule, in parallel over all chunks.

With u the rows' writes in a chunk, S the state before it, and G the decays from the chunk's start::

    u = T' (v − G∘(k S^T))    T' = (I + A)^-1 diag(β),  A_tj = β_t (G_t/G_j) k_t·k_j for j < t
    o = G∘(q S^T) + P u       P_tj = (G_t/G_j) q_t·k_j for j <= t

T' and P depend on no state. `prepare_head` writes them and log2 G for one decay a head. `prepare_key` serves one decay
a key element, and also writes G∘k, (G_last/G)∘k and G∘q. Example: 8192 rows, 32 heads, 16 key heads of 128, bfloat16.
67 MB read and 68 MB written take 31 µs at 4.3 TB/s.
"""

import triton
import triton.language as tl

from .extend_chunks import CHUNK, LOG2_E, find_chunk, invert_unit_lower, load_rows, product
from .shared import bound, inline, running_total, smallest, total

LARGEST_EXPONENT = tl.constexpr(115.0)
"""Exponent of 2 up to which one factor of a decay ratio is formed: far from the largest float32 and bfloat16."""
REQUEST_BLOCK = tl.constexpr(256)


@inline
def store_square(base, values):
    """Store a matrix ``[CHUNK, CHUNK]``."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    tl.store(base + row * CHUNK + column, values.to(base.dtype.element_ty))


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["log_decay", "beta", "q_indptr"])
def prepare_head(
    q,
    k,
    log_decay,
    beta,
    q_indptr,
    gates,
    solved,
    scores,
    num_requests,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_decay_row,
    stride_decay_head,
    stride_beta_row,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write T', P and log2 G of one chunk for one head.

    Args:
        q, k: ``[rows, key heads, KEY_DIM]``.
        log_decay: float32 ``[rows, HEADS]``; a constant decay has row stride 0.
        beta: float32 ``[rows, HEADS]``.
        gates: float32 ``[chunks, HEADS, CHUNK]``, output: log2 of the decay from the chunk's start.
        solved, scores: ``[chunks, HEADS, CHUNK, CHUNK]`` in q's dtype, output: T' and P.
    """
    chunk, head = tl.program_id(1), tl.program_id(0)
    first, end = find_chunk(q_indptr, num_requests, chunk, REQUEST_BLOCK)
    if first < end:
        index = tl.arange(0, CHUNK)
        row, column = index[:, None], index[None, :]
        rows, live = (first + index).to(tl.int64), first + index < end
        key_head = head // HEADS_PER_KEY
        own_k = load_rows(k + key_head * stride_k_head, rows, live, stride_k_row, KEY_DIM, BLOCK_K)
        own_q = load_rows(q + key_head * stride_q_head, rows, live, stride_q_row, KEY_DIM, BLOCK_K)
        decay = tl.load(log_decay + rows * stride_decay_row + head * stride_decay_head, mask=live, other=0.0) * LOG2_E
        strength = tl.load(beta + rows * stride_beta_row + head, mask=live, other=0.0)
        gate = running_total(decay, 0)
        at = chunk.to(tl.int64) * HEADS + head
        tl.store(gates + at * CHUNK + index, gate)
        ratio = tl.exp2(tl.where(row >= column, gate[:, None] - gate[None, :], -float("inf")))
        store_square(scores + at * CHUNK * CHUNK, product(own_q, tl.trans(own_k), None, PRECISION) * ratio)
        below = product(own_k, tl.trans(own_k), None, PRECISION) * ratio * strength[:, None]
        inverse = invert_unit_lower(tl.where(row > column, below, 0.0), PRECISION)
        store_square(solved + at * CHUNK * CHUNK, inverse * strength[None, :])


@inline
def diagonal_products(q, k, log_decay, rows, live, strides, DIM: tl.constexpr, BLOCK: tl.constexpr, blocks):
    """Replace the diagonal blocks of 16 in q·k and k·k by sums of exact decay ratios, for decays below 2**-115.

    Args:
        strides: row strides of q, k and log_decay.
        blocks: (q·k, k·k) of the chunk, each ``[CHUNK, CHUNK]``.
    """
    query_key, key_key = blocks
    index = tl.arange(0, CHUNK)
    row, column = index[:, None], index[None, :]
    own_q = load_rows(q, rows, live, strides[0], DIM, BLOCK).to(tl.float32)
    own_k = load_rows(k, rows, live, strides[1], DIM, BLOCK).to(tl.float32)
    log_ratio = tl.full((CHUNK, BLOCK), 0.0, tl.float32)
    for distance in range(bound(16)):
        inside = live & (index % 16 >= distance)
        other = load_rows(k, rows - distance, inside, strides[1], DIM, BLOCK).to(tl.float32) * tl.exp2(log_ratio)
        here = (column == row - distance) & inside[:, None]
        query_key = tl.where(here, total(own_q * other, 1)[:, None], query_key)
        key_key = tl.where(here, total(own_k * other, 1)[:, None], key_key)
        log_ratio += load_rows(log_decay, rows - distance, inside, strides[2], DIM, BLOCK) * LOG2_E
    return query_key, key_key


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["beta", "q_indptr"])
def prepare_key(
    q,
    k,
    log_decay,
    beta,
    q_indptr,
    gates,
    solved,
    scores,
    keys_in,
    keys_out,
    queries,
    num_requests,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_decay_row,
    stride_decay_head,
    stride_beta_row,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write T', P, log2 G_last, G∘k, (G_last/G)∘k and G∘q of one chunk for one head.

    A decay ratio of two rows in different blocks of 16 is the product of two factors up to 1, which meet at the start
    of the later block. In a diagonal block the second factor is above 1, so its exponent is limited. Blocks that reach
    the limit are computed from exact ratios instead.

    Args:
        log_decay: float32 ``[rows, HEADS, KEY_DIM]``.
        gates: float32 ``[chunks, HEADS, BLOCK_K]``, output: log2 of the decay of the whole chunk.
        keys_in, keys_out, queries: ``[chunks, HEADS, CHUNK, BLOCK_K]`` in q's dtype, output; zeros past the last row.
        WIDE: form products in float32, because large factors exceed the range of float16.
    """
    chunk, head = tl.program_id(1), tl.program_id(0)
    first, end = find_chunk(q_indptr, num_requests, chunk, REQUEST_BLOCK)
    if first < end:
        index, element = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
        row, column = index[:, None], index[None, :]
        rows, live = (first + index).to(tl.int64), first + index < end
        q += head // HEADS_PER_KEY * stride_q_head
        k += head // HEADS_PER_KEY * stride_k_head
        log_decay += head * stride_decay_head
        own_q = load_rows(q, rows, live, stride_q_row, KEY_DIM, BLOCK_K).to(tl.float32)
        own_k = load_rows(k, rows, live, stride_k_row, KEY_DIM, BLOCK_K).to(tl.float32)
        decay = load_rows(log_decay, rows, live, stride_decay_row, KEY_DIM, BLOCK_K) * LOG2_E
        strength = tl.load(beta + rows * stride_beta_row + head, mask=live, other=0.0)

        # Decays from the start of each block of 16, and from the chunk's start to each block.
        inner = running_total(tl.reshape(decay, (4, 16, BLOCK_K)), 1)
        blocks = total(tl.reshape(decay, (4, 16, BLOCK_K)), 1)
        before = running_total(blocks, 0) - blocks
        last = total(blocks, 0)
        gate = tl.reshape(inner + before[:, None, :], (CHUNK, BLOCK_K))
        inner = tl.reshape(inner, (CHUNK, BLOCK_K))
        at = chunk.to(tl.int64) * HEADS + head
        tl.store(gates + at * BLOCK_K + element, last)
        tile, place = row * BLOCK_K + element[None, :], at * CHUNK * BLOCK_K
        dtype: tl.constexpr = keys_in.dtype.element_ty
        tl.store(keys_in + place + tile, (own_k * tl.exp2(gate)).to(dtype))
        tl.store(keys_out + place + tile, (own_k * tl.exp2(tl.minimum(last[None, :] - gate, 0.0))).to(dtype))
        tl.store(queries + place + tile, (own_q * tl.exp2(gate)).to(dtype))

        factor = tl.exp2(inner)
        wide: tl.constexpr = tl.float32 if WIDE else dtype
        scaled_q, scaled_k = (own_q * factor).to(wide), (own_k * factor).to(wide)
        query_key = tl.full((CHUNK, CHUNK), 0.0, tl.float32)
        key_key = tl.full((CHUNK, CHUNK), 0.0, tl.float32)
        for block in tl.static_range(4):
            start = total(tl.where(tl.arange(0, 4)[:, None] == block, before, 0.0), 0)
            exponent = tl.minimum(start[None, :] - gate, LARGEST_EXPONENT)
            other = tl.trans(tl.where(row < 16 * block + 16, own_k * tl.exp2(exponent), 0.0).to(wide))
            here = row // 16 == block
            query_key = tl.where(here, product(scaled_q, other, None, PRECISION), query_key)
            key_key = tl.where(here, product(scaled_k, other, None, PRECISION), key_key)
        if smallest(smallest(inner, 0), 0) < -LARGEST_EXPONENT:
            strides = (stride_q_row, stride_k_row, stride_decay_row)
            query_key, key_key = diagonal_products(
                q, k, log_decay, rows, live, strides, KEY_DIM, BLOCK_K, (query_key, key_key)
            )
        store_square(scores + at * CHUNK * CHUNK, tl.where(row >= column, query_key, 0.0))
        below = tl.where(row > column, key_key * strength[:, None], 0.0)
        inverse = invert_unit_lower(below, PRECISION)
        store_square(solved + at * CHUNK * CHUNK, inverse * strength[None, :])
