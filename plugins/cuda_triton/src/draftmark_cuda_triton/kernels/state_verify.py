"""Recurrence of a verify in the masked form: all rows of a chain or tree from the state, which is read once.

A program computes one request's rows for one head and BLOCK_V value elements, by blocks of 16. With the matrices of
`pairs` and G_t, the product of the decays of row t and its ancestors::

    u = T (v − G S k − K u')      delta rule; else u = v      o = G S q + P u + P' u'

u' are the updates of earlier blocks, which the program reads back from the records. Example: 64 requests of 8 rows, 32
heads, 128 x 128, float32: 134 MB of states take 33 µs at 4.0 TB/s; rows and records add 10 %.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import bound, inline
from .state_products import ROWS, product, state_times


@inline
def matrices_of(at_pair, width, DELTA: tl.constexpr):
    """Return both matrices of a pair of blocks, transposed; the first is undefined without a delta rule."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, ROWS)[:, None]
    at, inside = at_pair + row * width + column, (row < width) & (column < width)
    among_queries = tl.load(at + width * width, mask=inside, other=0.0)
    if DELTA:
        return tl.load(at, mask=inside, other=0.0), among_queries
    else:
        return among_queries, among_queries


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
):
    """Compute the rows of one request and head for BLOCK_V value elements, and record their updates.

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
    """
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, key_head = tl.num_programs(1), head // HEADS_PER_KEY
    value, key = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    v_inside, k_inside = value < VALUE_DIM, key < KEY_DIM
    first, last = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    count = (last - first).to(tl.int32)
    padding = tl.load(q_indptr + tl.num_programs(2)).to(tl.int64) + request
    while padding < num_rows:  # each program writes every R-th padding row
        nothing = tl.full((BLOCK_V,), 0, out.dtype.element_ty)
        tl.store(out + (padding * heads + head) * VALUE_DIM + value, nothing, mask=v_inside)
        padding += tl.num_programs(2)
    if count > 0:
        slot = tl.load(slots + request).to(tl.int64)
        has_prefix = tl.load(prefix_lens + request) > 0
        at_state = state + slot * stride_slot + head.to(tl.int64) * (VALUE_DIM * KEY_DIM)
        at_state += value[:, None] * KEY_DIM + key[None, :]
        held = tl.load(at_state, mask=v_inside[:, None] & k_inside[None, :] & has_prefix, other=0.0).to(tl.float32)
        at_q = q + first * stride_q_row + key_head * stride_q_head + key[None, :]
        at_k = k + first * stride_k_row + key_head * stride_k_head + key[None, :]
        at_v = v + first * stride_v_row + head * stride_v_head + value[:, None]
        at_update = updates + ((first_entry + request) * nodes * heads + head) * VALUE_DIM + value[:, None]
        at_out = out + (first * heads + head) * VALUE_DIM + value[:, None]
        GATES: tl.constexpr = KEY_DIM if KEY_GATE else 1
        at_total = totals + (request * nodes * heads + head) * GATES
        at_matrix = matrices + (request * heads + head) * pairs * 2 * width * width
        for block in range(0, 1 if ONE_BLOCK else bound((count + ROWS - 1) // ROWS)):
            row = tl.arange(0, ROWS) + block * ROWS
            line, across, live = row.to(tl.int64)[:, None], row.to(tl.int64)[None, :], row < count
            k_live, v_live = live[:, None] & k_inside[None, :], live[None, :] & v_inside[:, None]
            row_k = tl.load(at_k + line * stride_k_row, mask=k_live, other=0.0)
            row_q = tl.load(at_q + line * stride_q_row, mask=k_live, other=0.0)
            update = tl.load(at_v + across * stride_v_row, mask=v_live, other=0.0)
            if not DELTA:
                tl.store(at_update + across * (heads * VALUE_DIM), update, mask=v_live)
            update = update.to(tl.float32)
            pair = block * (block + 1) // 2
            solve, among_queries = matrices_of(at_matrix + (pair + block) * 2 * width * width, width, DELTA)
            if KEY_GATE:
                decay = tl.exp(tl.load(at_total + line * (heads * KEY_DIM) + key[None, :], mask=k_live, other=0.0))
                found = state_times(held, row_q.to(tl.float32) * decay, 0, PRECISE)
                if DELTA:
                    update -= state_times(held, row_k.to(tl.float32) * decay, 0, PRECISE)
            else:
                decay = tl.exp(tl.load(at_total + row * heads, mask=live, other=0.0))[None, :]
                found = state_times(held, row_q, PARTS, PRECISE) * decay
                if DELTA:
                    update -= state_times(held, row_k, PARTS, PRECISE) * decay
            if not ONE_BLOCK:
                for other in range(0, bound(block)):
                    before_k, before_q = matrices_of(at_matrix + (pair + other) * 2 * width * width, width, DELTA)
                    at = (tl.arange(0, ROWS) + other * ROWS).to(tl.int64)[None, :]
                    earlier = tl.load(at_update + at * (heads * VALUE_DIM), mask=v_inside[:, None], other=0.0)
                    earlier = earlier.to(tl.float32)
                    found += product(earlier, before_q, PRECISE)
                    if DELTA:
                        update -= product(earlier, before_k, PRECISE)
            if DELTA:
                update = product(update, solve, PRECISE)
                tl.store(at_update + across * (heads * VALUE_DIM), update, mask=v_live)
            found += product(update, among_queries, PRECISE)
            tl.store(at_out + across * (heads * VALUE_DIM), convert(found, out.dtype.element_ty), mask=v_live)
            if not ONE_BLOCK:
                tl.debug_barrier()  # the next block reads updates that other threads wrote
