"""Recurrence row by row, the state in place: one row of each request (decode), or every row.

A program holds a tile ``[CHUNKS, BLOCK_V, CHUNK]`` of one head's state. Tile of 32 value elements and 128 keys in
float32: 16 KiB, loaded by 128 threads with 16 bytes each, 8 threads for a cache line. Example: 64 requests, 32 heads,
128 x 128, float32: 134 MB read and 134 MB written take 67 µs at 4.0 TB/s.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import bound, inline
from .state_tile import sum_over_keys, tile_of


@inline
def one_row(
    held, row, at_q, at_k, at_v, at_decay, at_beta, at_out, key, v_inside, k_inside, stride_q, stride_k, stride_v,
    stride_decay, stride_beta, stride_out, DELTA: tl.constexpr, KEY_GATE: tl.constexpr,
):  # fmt: skip
    """Return a state tile after one row, and store the row's output. The addresses are those of row 0."""
    row_q = tl.load(at_q + row * stride_q, mask=k_inside, other=0.0).to(tl.float32)
    row_k = tl.load(at_k + row * stride_k, mask=k_inside, other=0.0).to(tl.float32)
    write = tl.load(at_v + row * stride_v, mask=v_inside, other=0.0).to(tl.float32)
    if KEY_GATE:
        held *= tl.exp(tl.load(at_decay + row * stride_decay + key, mask=k_inside, other=0.0))
    else:
        held *= tl.exp(tl.load(at_decay + row * stride_decay))
    if DELTA:
        write = tl.load(at_beta + row * stride_beta) * (write - sum_over_keys(held * row_k))
    held += write[None, :, None] * row_k
    tl.store(at_out + row * stride_out, convert(sum_over_keys(held * row_q), at_out.dtype.element_ty), mask=v_inside)
    return held


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
    stride_slot,
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
        state: ``[num_slots, num_heads, VALUE_DIM, KEY_DIM]`` of one layer; slots have any pitch.
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
        slot = tl.load(slots + request).to(tl.int64)
        has_prefix = tl.load(prefix_lens + request) > 0
        place = state + slot * stride_slot + head.to(tl.int64) * (VALUE_DIM * KEY_DIM) + offsets
        held = tl.load(place, mask=inside & has_prefix, other=0.0).to(tl.float32)
        at_q, at_k = q + key_head * stride_q_head + key, k + key_head * stride_k_head + key
        at_v, at_out = v + head * stride_v_head + value, out + head * VALUE_DIM + value
        at_decay, at_beta = log_decay + head * stride_decay_head, beta + head
        if ONE_ROW:
            held = one_row(
                held, row, at_q, at_k, at_v, at_decay, at_beta, at_out, key, value < VALUE_DIM, key < KEY_DIM,
                stride_q_row, stride_k_row, stride_v_row, stride_decay_row, stride_beta_row, heads * VALUE_DIM,
                DELTA, KEY_GATE,
            )  # fmt: skip
        else:
            for step in range(0, bound((end - row).to(tl.int32))):
                held = one_row(
                    held, row + step, at_q, at_k, at_v, at_decay, at_beta, at_out, key, value < VALUE_DIM,
                    key < KEY_DIM, stride_q_row, stride_k_row, stride_v_row, stride_decay_row, stride_beta_row,
                    heads * VALUE_DIM, DELTA, KEY_GATE,
                )  # fmt: skip
        tl.store(place, convert(held, state.dtype.element_ty), mask=inside)
