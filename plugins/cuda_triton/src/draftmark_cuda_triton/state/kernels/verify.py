"""Recurrence of a verify in the masked form: all rows of a chain or tree from the state, which is read once.

A program computes one request's rows for one head and BLOCK_V value elements, by blocks of 16. With the matrices of
`pairs` and G_t, the product of the decays of row t and its ancestors::

    u = T (v − G S k − K u')      delta rule; else u = v      o = G S q + P u + P' u'

u' are the updates of earlier blocks, which the program reads back from the records. Example: 64 requests of 8 rows, 32
heads, 128 x 128, float32: 134 MB of states take 33 µs at 4.0 TB/s; rows and records add 10 %.
"""

import triton
import triton.language as tl

from .products import ROWS, product, state_times
from .shared import bound, convert, inline


@inline
def matrices_of(at_pair, width, DEPTH: tl.constexpr):
    """Return both matrices of a pair of blocks, transposed and side by side, ``[DEPTH, 32]``, zero from row 16 on."""
    column, row = tl.arange(0, DEPTH)[:, None], tl.arange(0, 2 * ROWS)[None, :]
    at = at_pair + (row // ROWS * width + row % ROWS) * width + column
    return tl.load(at, mask=(row % ROWS < width) & (column < width), other=0.0)


@inline
def keys_and_queries(at_k, at_q, stride_k, stride_q, first, count, key, k_inside):
    """Return 16 keys, then 16 queries, ``[32, BLOCK_K]``, from row `first` of a request on."""
    line = tl.arange(0, 2 * ROWS)[:, None]
    row = (line % ROWS + first).to(tl.int64)
    at = tl.where(line < ROWS, at_k + row * stride_k, at_q + row * stride_q) + key[None, :]
    return tl.load(at, mask=(row < count) & k_inside[None, :], other=0.0)


@inline
def decays_of(at_total, stride_total, first, count, key, k_inside, KEY_GATE: tl.constexpr):
    """Return G of 16 rows twice, ``[32]`` or ``[32, BLOCK_K]``."""
    row = (tl.arange(0, 2 * ROWS) % ROWS + first).to(tl.int64)
    if KEY_GATE:
        at = at_total + row[:, None] * stride_total + key[None, :]
        return tl.exp(tl.load(at, mask=(row < count)[:, None] & k_inside[None, :], other=0.0))
    else:
        return tl.exp(tl.load(at_total + row * stride_total, mask=row < count, other=0.0))


@inline
def rows_of_block(
    held, rows, block, count, key, k_inside, width, at_v, at_update, at_out, at_matrix, at_total, stride_v, stride_out,
    stride_total, v_inside, DELTA: tl.constexpr, KEY_GATE: tl.constexpr, PARTS: tl.constexpr, PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute and store the outputs and updates of 16 rows for one tile of the state.

    A tile ``[BLOCK_V, 32]`` has what concerns u in its first 16 columns, and what concerns o in the others.

    Args:
        held: state tile ``[BLOCK_V, BLOCK_K]``.
        rows: of `keys_and_queries`.
        at_v, at_update, at_out: addresses of the request's row 0 for each value element, ``[BLOCK_V, 1]``.
    """
    column = tl.arange(0, 2 * ROWS)[None, :]
    row = column % ROWS + block * ROWS
    for_u = v_inside[:, None] & (column < ROWS) & (row < count)
    for_o = v_inside[:, None] & (column >= ROWS) & (row < count)
    row = row.to(tl.int64)
    value = tl.load(at_v + row * stride_v, mask=for_u, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # for the kernel of the matrices; the state and the rows are loaded meanwhile
    decay = decays_of(at_total, stride_total, block * ROWS, count, key, k_inside, KEY_GATE)
    size, pair = 2 * width * width, block * (block + 1) // 2
    own = matrices_of(at_matrix + (pair + block) * size, width, 2 * ROWS)
    if KEY_GATE:
        found = state_times(held, rows.to(tl.float32) * decay, 0, PRECISE)
    else:
        found = state_times(held, rows, PARTS, PRECISE) * decay[None, :]
    for other in range(0, bound(block)):
        at = (tl.arange(0, ROWS) + other * ROWS).to(tl.int64)[None, :]
        earlier = tl.load(at_update + at * stride_out, mask=v_inside[:, None], other=0.0).to(tl.float32)
        found += product(earlier, matrices_of(at_matrix + (pair + other) * size, width, ROWS), PRECISE)
    # Without a delta rule u is v.
    update = tl.where(for_u, value.to(tl.float32) - (found if DELTA else 0.0), 0.0)
    found = tl.where(for_o, found, 0.0) + product(update, own, PRECISE)
    if DELTA:
        tl.store(at_update + row * stride_out, found, mask=for_u)
    else:
        tl.store(at_update + row * stride_out, value, mask=for_u)
    tl.store(at_out + row * stride_out, convert(found, at_out.dtype.element_ty), mask=for_o)


@triton.jit(
    do_not_specialize=["num_rows", "first_entry", "nodes", "width", "pairs"],
    do_not_specialize_on_alignment=["slots", "prefix_lens", "q_indptr"],
)
def recur_verify(
    q,
    k,
    v,
    state,
    slots,
    prefix_lens,
    q_indptr,
    out,
    updates,
    totals,
    matrices,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_slot,
    num_rows,
    first_entry,
    nodes,
    width,
    pairs,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    KEY_GATE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of one request and head for TILES · BLOCK_V value elements, and record their updates.

    Args:
        q, k, v, out: as in `StateBackend.recur`.
        state: ``[num_slots, num_heads, VALUE_DIM, KEY_DIM]`` of one layer, read-only.
        slots, prefix_lens, q_indptr: fields of the batch.
        updates: records of all layers, ``[num_layers · max_reqs, nodes, heads, VALUE_DIM]``.
        totals, matrices, width: of `pairs.verify_pairs`; `pairs` pairs of blocks for each request and head.
        first_entry: layer · max_reqs, the record entry of request 0.
        nodes: D.
        ONE_BLOCK: no request has more than 16 rows.
        PARTS, PRECISE: see `state_times` and `product`.
        BLOCK_K: KEY_DIM rounded up to a power of two.
        TILES, STAGES: tiles of BLOCK_V value elements of a program, and tiles that are loaded at once.
        PDL: the launch is a programmatic dependent of `pairs.verify_pairs`.
    """
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, key_head, key = tl.num_programs(1), head // HEADS_PER_KEY, tl.arange(0, BLOCK_K)
    first, last = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    slot, has_prefix = tl.load(slots + request).to(tl.int64), tl.load(prefix_lens + request) > 0
    count, k_inside, stride_out = (last - first).to(tl.int32), key < KEY_DIM, heads * VALUE_DIM
    first_value = tl.program_id(0) * (TILES * BLOCK_V)
    if count > 0:
        at_q = q + first * stride_q_row + key_head * stride_q_head
        at_k = k + first * stride_k_row + key_head * stride_k_head
        GATES: tl.constexpr = KEY_DIM if KEY_GATE else 1
        at_total, stride_total = totals + (request * nodes * heads + head) * GATES, heads * GATES
        at_matrix = matrices + (request * heads + head) * pairs * 2 * width * width
        at_state = state + slot * stride_slot + head.to(tl.int64) * (VALUE_DIM * KEY_DIM)
        if ONE_BLOCK:
            rows = keys_and_queries(at_k, at_q, stride_k_row, stride_q_row, 0, count, key, k_inside)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            value = first_value + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            v_inside = value < VALUE_DIM
            at_held = at_state + value[:, None] * KEY_DIM + key[None, :]
            held = tl.load(at_held, mask=v_inside[:, None] & k_inside[None, :] & has_prefix, other=0.0)
            held = held.to(tl.float32)
            at_v = v + first * stride_v_row + head * stride_v_head + value[:, None]
            at_update = updates + ((first_entry + request) * nodes * heads + head) * VALUE_DIM + value[:, None]
            at_out = out + (first * heads + head) * VALUE_DIM + value[:, None]
            if ONE_BLOCK:
                rows_of_block(
                    held, rows, 0, count, key, k_inside, width, at_v, at_update, at_out, at_matrix, at_total,
                    stride_v_row, stride_out, stride_total, v_inside, DELTA, KEY_GATE, PARTS, PRECISE, PDL,
                )  # fmt: skip
            else:
                for block in range(0, bound((count + ROWS - 1) // ROWS)):
                    rows = keys_and_queries(at_k, at_q, stride_k_row, stride_q_row, block * ROWS, count, key, k_inside)
                    rows_of_block(
                        held, rows, block, count, key, k_inside, width, at_v, at_update, at_out, at_matrix, at_total,
                        stride_v_row, stride_out, stride_total, v_inside, DELTA, KEY_GATE, PARTS, PRECISE, PDL,
                    )  # fmt: skip
                    tl.debug_barrier()  # the next block reads updates that other threads wrote
    padding = tl.load(q_indptr + tl.num_programs(2)).to(tl.int64) + request
    while padding < num_rows:  # each program writes every R-th padding row
        for tile in range(0, TILES):
            value = first_value + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            nothing = tl.full((BLOCK_V,), 0, out.dtype.element_ty)
            tl.store(out + (padding * heads + head) * VALUE_DIM + value, nothing, mask=value < VALUE_DIM)
        padding += tl.num_programs(2)
