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

from .convert import convert
from .inline import bound, inline
from .reduce import running_total, smallest, total
from .state_extend_chunks import CHUNK, LOG2_E, find_chunk, invert_unit_lower, load_rows, product

LARGEST_EXPONENT = tl.constexpr(100.0)
"""Exponent of 2 up to which a factor of a decay ratio is formed: products of small keys stay normal in bfloat16."""
REQUEST_BLOCK = tl.constexpr(256)


@inline
def store_square(base, values):
    """Store a matrix ``[CHUNK, CHUNK]``."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    tl.store(base + row * CHUNK + column, convert(values, base.dtype.element_ty))


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
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
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
    """Replace the diagonal blocks of 16 in q·k and k·k by sums of exact decay ratios.

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


@inline
def products_by_block(
    q, k, log_decay, rows, live, strides, DIM: tl.constexpr, BLOCK: tl.constexpr, decay, gate, wide, P
):
    """Return q·k and k·k of a chunk in which decays leave the range of one factor.

    The decay ratio of two rows in different blocks of 16 is the product of two factors up to 1, which meet at the start
    of the later block. The diagonal blocks are computed from exact ratios if a factor would be too large there.

    Args:
        decay, gate: log2 of each row's decay, and of the decays from the chunk's start.
        wide: dtype of the products' operands; P: their precision.
    """
    index = tl.arange(0, CHUNK)
    row = index[:, None]
    query_key = tl.full((CHUNK, CHUNK), 0.0, tl.float32)
    key_key = tl.full((CHUNK, CHUNK), 0.0, tl.float32)
    least = 0.0
    for block in range(bound(4)):
        start = total(tl.where(row < 16 * block, decay, 0.0), 0)[None, :]
        inside = row // 16 == block
        least = tl.minimum(least, smallest(smallest(tl.where(inside, gate - start, 0.0), 0), 0))
        factor = tl.exp2(tl.minimum(gate - start, 0.0))
        own_k = load_rows(k, rows, live, strides[1], DIM, BLOCK).to(tl.float32)
        exponent = tl.minimum(start - gate, LARGEST_EXPONENT)
        other = tl.trans(convert(tl.where(row < 16 * block + 16, own_k * tl.exp2(exponent), 0.0), wide))
        key_key = tl.where(inside, product(convert(own_k * factor, wide), other, None, P), key_key)
        own_q = load_rows(q, rows, live, strides[0], DIM, BLOCK).to(tl.float32)
        query_key = tl.where(inside, product(convert(own_q * factor, wide), other, None, P), query_key)
    if least < -LARGEST_EXPONENT:
        query_key, key_key = diagonal_products(q, k, log_decay, rows, live, strides, DIM, BLOCK, (query_key, key_key))
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

    P and A need decay ratios of two rows. Usually they are products of the factors G and 1/G. If 1/G would be too
    large, `products_by_block` computes them.

    Args:
        log_decay: float32 ``[rows, HEADS, KEY_DIM]``.
        gates: float32 ``[chunks, HEADS, BLOCK_K]``, output: log2 of the decay of the whole chunk.
        keys_in, keys_out, queries: ``[chunks, HEADS, CHUNK, BLOCK_K]`` in q's dtype, output; zeros past the last row.
        WIDE: form products in float32, because large factors exceed the range of float16.
    """
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
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

        gate, last = running_total(decay, 0), total(decay, 0)
        at = chunk.to(tl.int64) * HEADS + head
        tl.store(gates + at * BLOCK_K + element, last)
        tile, place = row * BLOCK_K + element[None, :], at * CHUNK * BLOCK_K
        dtype: tl.constexpr = keys_in.dtype.element_ty
        wide: tl.constexpr = tl.float32 if WIDE else dtype
        grown = tl.exp2(gate)
        scaled_q, scaled_k = own_q * grown, own_k * grown
        tl.store(queries + place + tile, convert(scaled_q, dtype))
        tl.store(keys_in + place + tile, convert(scaled_k, dtype))
        tl.store(keys_out + place + tile, convert(own_k * tl.exp2(tl.minimum(last[None, :] - gate, 0.0)), dtype))
        if smallest(last, 0) > -LARGEST_EXPONENT:
            other = tl.trans(convert(own_k * tl.exp2(-gate), wide))
            query_key = product(convert(scaled_q, wide), other, None, PRECISION)
            key_key = product(convert(scaled_k, wide), other, None, PRECISION)
        else:
            strides = (stride_q_row, stride_k_row, stride_decay_row)
            query_key, key_key = products_by_block(
                q, k, log_decay, rows, live, strides, KEY_DIM, BLOCK_K, decay, gate, wide, PRECISION
            )
        store_square(scores + at * CHUNK * CHUNK, tl.where(row >= column, query_key, 0.0))
        below = tl.where(row > column, key_key * strength[:, None], 0.0)
        inverse = invert_unit_lower(below, PRECISION)
        store_square(solved + at * CHUNK * CHUNK, inverse * strength[None, :])
