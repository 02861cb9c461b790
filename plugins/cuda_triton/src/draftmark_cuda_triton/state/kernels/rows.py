"""Recurrence row by row, the state in place: one row of each request (decode), or every row.

A program holds a tile ``[CHUNKS, BLOCK_V, CHUNK]`` of one head's state. Tile of 32 value elements and 128 keys in
float32: 16 KiB, loaded by 128 threads with 16 bytes each, 8 threads for a cache line. Example: 64 requests, 32 heads,
128 x 128, float32: 134 MB read and 134 MB written take 67 µs at 4.0 TB/s.
"""

import triton
import triton.language as tl

from .shared import convert
from .tile import sum_over_keys, tile_of


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["log_decay", "beta", "slots", "prefix_lens", "q_indptr"],
)
def recur_rows(
    q,
    k,
    v,
    log_decay,
    beta,
    state,
    slots,
    prefix_lens,
    q_indptr,
    out,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_decay_row,
    stride_decay_head,
    stride_beta_row,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    KEY_GATE: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Compute the rows of one request and head for BLOCK_V value elements, and leave the state after them in its slot.

    Args:
        q, k, v, log_decay, beta, out: as in `StateBackend.recur`; a constant decay has row stride 0.
        state: ``[num_slots, num_heads, VALUE_DIM, KEY_DIM]`` of one layer.
        slots, prefix_lens, q_indptr: fields of the batch.
        ONE_ROW: each request has one row, so row r is request r's.
    """
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, end = request, request + 1
    if not ONE_ROW:
        row, end = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    if row < end:
        heads, key_head = tl.num_programs(1), head // HEADS_PER_KEY
        value, key, offsets, inside = tile_of(tl.program_id(0) * BLOCK_V, VALUE_DIM, KEY_DIM, BLOCK_V, CHUNK, CHUNKS)
        v_inside, k_inside = value < VALUE_DIM, key < KEY_DIM
        slot = tl.load(slots + request).to(tl.int64)
        has_prefix = tl.load(prefix_lens + request) > 0
        place = state + (slot * heads + head) * (VALUE_DIM * KEY_DIM) + offsets
        held = tl.load(place, mask=inside & has_prefix, other=0.0).to(tl.float32)
        while row < end:
            at_q = q + row * stride_q_row + key_head * stride_q_head + key
            at_k = k + row * stride_k_row + key_head * stride_k_head + key
            row_q = tl.load(at_q, mask=k_inside, other=0.0).to(tl.float32)
            row_k = tl.load(at_k, mask=k_inside, other=0.0).to(tl.float32)
            write = tl.load(v + row * stride_v_row + head * stride_v_head + value, mask=v_inside, other=0.0)
            write = write.to(tl.float32)
            at_decay = log_decay + row * stride_decay_row + head * stride_decay_head
            if KEY_GATE:
                held *= tl.exp(tl.load(at_decay + key, mask=k_inside, other=0.0))
            else:
                held *= tl.exp(tl.load(at_decay))
            if DELTA:
                write = tl.load(beta + row * stride_beta_row + head) * (write - sum_over_keys(held * row_k))
            held += write[None, :, None] * row_k
            found = sum_over_keys(held * row_q)
            tl.store(
                out + (row * heads + head) * VALUE_DIM + value, convert(found, out.dtype.element_ty), mask=v_inside
            )
            row += 1
        tl.store(place, convert(held, state.dtype.element_ty), mask=inside)
