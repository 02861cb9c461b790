"""Kernels of EXTEND that carry the state through the chunks of a request and write the outputs.

A program owns value rows of one head's state ``[BLOCK_V, key_dim]`` in float32 registers. All products have the state,
or rows of values, on the left: their operands come from registers, so that no intermediate passes through shared
memory. The state is read and written once a request.

::

    delta:  u^T = v^T T'^T − (S k^T)∘G T'^T     o^T = (S q^T)∘G + u^T P^T        S ← G_last S + (u∘G_last/G)^T k
    decay:  P_tj = (G_t/G_j) q_t·k_j           o^T = (S q^T)∘G + v^T P^T        S ← G_last S + (v∘G_last/G)^T k

Bytes of one chunk and head, heads of 128, 16 bits: k, q and values 64 KiB, T' and P 16 KiB.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import bound, inline
from .reduce import running_total, total
from .state_extend_chunks import CHUNK, LOG2_E, first_chunk, load_rows, product


@inline
def load_columns(base, rows, live, stride, value, VALUE_DIM: tl.constexpr):
    """Return value rows of one head, transposed ``[values, rows]``: zeros in dead rows and past VALUE_DIM."""
    mask = live[None, :] & (value < VALUE_DIM)[:, None]
    return tl.load(base + rows[None, :] * stride + value[:, None], mask=mask, other=0.0)


@inline
def store_columns(base, rows, live, stride, value, values, VALUE_DIM: tl.constexpr):
    """Store transposed outputs ``[values, rows]`` of one head."""
    mask = live[:, None] & (value < VALUE_DIM)[None, :]
    tl.store(
        base + rows[:, None] * stride + value[None, :], convert(tl.trans(values), base.dtype.element_ty), mask=mask
    )


@inline
def state_elements(value, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return offset in a head's state and existence of each element ``[values, BLOCK_K]``."""
    element = tl.arange(0, BLOCK_K)
    exists = (value < VALUE_DIM)[:, None] & (element < KEY_DIM)[None, :]
    return value[:, None] * KEY_DIM + element[None, :], exists


@inline
def load_state(own, exists, prefix_len):
    """Return a state in float32, zeros without a prefix: its slot may hold anything then, NaN included."""
    return tl.load(own, mask=exists & (prefix_len > 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "prefix_lens", "q_indptr"])
def extend_delta(
    q,
    k,
    v,
    gates,
    solved,
    scores,
    keys_in,
    keys_out,
    queries,
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
    stride_slot,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run the delta rule over the prepared chunks of one request, for BLOCK_V value rows of one head.

    Args:
        gates, solved, scores, keys_in, keys_out, queries: outputs of `prepare_head` or, with BY_KEY, `prepare_key`;
            `prepare_head` has no keys_in, keys_out and queries.
        state: ``[slots, HEADS, VALUE_DIM, KEY_DIM]``, a slot contiguous; read if the prefix length is above 0.
        slots: int32 ``[R]``.
        out: ``[rows, HEADS, VALUE_DIM]``.
    """
    request, block = tl.program_id(1), tl.program_id(0)
    start, end = tl.load(q_indptr + request), tl.load(q_indptr + request + 1)
    if start < end:
        head = block % HEADS
        value = block // HEADS * BLOCK_V + tl.arange(0, BLOCK_V)
        offset, exists = state_elements(value, KEY_DIM, VALUE_DIM, BLOCK_K)
        own = state + tl.load(slots + request).to(tl.int64) * stride_slot + head * VALUE_DIM * KEY_DIM + offset
        held = load_state(own, exists, tl.load(prefix_lens + request))
        index, element = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
        square = index[:, None] * CHUNK + index[None, :]
        tile = index[:, None] * BLOCK_K + element[None, :]
        dtype: tl.constexpr = v.dtype.element_ty
        first = first_chunk(q_indptr, request)
        key_head = head // HEADS_PER_KEY
        for chunk in tl.range(0, bound((end - start + CHUNK - 1) // CHUNK), num_stages=STAGES):
            at = (first + chunk).to(tl.int64) * HEADS + head
            rows = (start + chunk * CHUNK + index).to(tl.int64)
            live = rows < end
            if BY_KEY:
                from_state = tl.load(keys_in + at * CHUNK * BLOCK_K + tile)
                to_state = tl.load(keys_out + at * CHUNK * BLOCK_K + tile)
                own_q = tl.load(queries + at * CHUNK * BLOCK_K + tile)
            else:
                from_state = load_rows(k + key_head * stride_k_head, rows, live, stride_k_row, KEY_DIM, BLOCK_K)
                to_state = from_state
                own_q = load_rows(q + key_head * stride_q_head, rows, live, stride_q_row, KEY_DIM, BLOCK_K)
            values = load_columns(v + head * stride_v_head, rows, live, stride_v_row, value, VALUE_DIM)
            solve = tl.load(solved + at * CHUNK * CHUNK + square)
            score = tl.load(scores + at * CHUNK * CHUNK + square)
            operand = convert(held, dtype)
            predicted = product(operand, tl.trans(from_state), None, PRECISION)
            # The values pass through a product, so that they come from shared memory without a layout conversion.
            write = product(values, tl.trans(solve), None, PRECISION)
            seen = product(operand, tl.trans(own_q), None, PRECISION)
            if not BY_KEY:
                gate = tl.load(gates + at * CHUNK + index)
                last = tl.load(gates + at * CHUNK + CHUNK - 1)
                grown = tl.exp2(gate)[None, :]
                predicted *= grown
                seen *= grown
            write = product(convert(-predicted, dtype), tl.trans(solve), write, PRECISION)
            seen = product(convert(write, dtype), tl.trans(score), seen, PRECISION)
            if BY_KEY:
                held *= tl.exp2(tl.load(gates + at * BLOCK_K + element))[None, :]
            else:
                write *= tl.exp2(last - gate)[None, :]
                held *= tl.exp2(last)
            held = product(convert(write, dtype), to_state, held, PRECISION)
            store_columns(out + head * VALUE_DIM, rows, live, HEADS * VALUE_DIM, value, seen, VALUE_DIM)
        tl.store(own, convert(held, state.dtype.element_ty), mask=exists)


@inline
def decays_of(log_decay, rows, live, stride, count, CONSTANT: tl.constexpr):
    """Return log2 of the decays of a chunk: up to each row, from each row to each later one, from each row, of all.

    The difference of two large float32 sums would lose its last digits. So a constant decay is multiplied by the number
    of rows, and other sums are float64.

    Args:
        count: live rows of the chunk.
    """
    index = tl.arange(0, CHUNK)
    if CONSTANT:
        rate = tl.load(log_decay) * LOG2_E
        between = rate * (index[None, :] - index[:, None]).to(tl.float32)
        after = rate * (count - 1 - index).to(tl.float32)
        return rate * (index + 1).to(tl.float32), between, tl.minimum(after, 0.0), rate * count.to(tl.float32)
    else:
        decay = tl.load(log_decay + rows * stride, mask=live, other=0.0).to(tl.float64) * LOG2_E
        gate, last = running_total(decay), total(decay, 0)
        between, after = gate[None, :] - gate[:, None], tl.minimum(last - gate, 0.0)
        return gate.to(tl.float32), between.to(tl.float32), after.to(tl.float32), last.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["log_decay", "slots", "prefix_lens", "q_indptr"])
def extend_decay(
    q,
    k,
    v,
    log_decay,
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
    stride_slot,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CONSTANT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run a decaying state over the chunks of one request, for BLOCK_V value rows of one head.

    Args:
        log_decay: float32 ``[rows, HEADS]``, or ``[HEADS]`` with CONSTANT.
        state, slots, out: as in `extend_delta`.
    """
    request, block = tl.program_id(1), tl.program_id(0)
    start, end = tl.load(q_indptr + request), tl.load(q_indptr + request + 1)
    if start < end:
        head = block % HEADS
        value = block // HEADS * BLOCK_V + tl.arange(0, BLOCK_V)
        offset, exists = state_elements(value, KEY_DIM, VALUE_DIM, BLOCK_K)
        own = state + tl.load(slots + request).to(tl.int64) * stride_slot + head * VALUE_DIM * KEY_DIM + offset
        held = load_state(own, exists, tl.load(prefix_lens + request))
        index = tl.arange(0, CHUNK)
        dtype: tl.constexpr = v.dtype.element_ty
        key_head = head // HEADS_PER_KEY
        for chunk in tl.range(0, bound((end - start + CHUNK - 1) // CHUNK), num_stages=STAGES):
            rows = (start + chunk * CHUNK + index).to(tl.int64)
            live = rows < end
            own_k = load_rows(k + key_head * stride_k_head, rows, live, stride_k_row, KEY_DIM, BLOCK_K)
            own_q = load_rows(q + key_head * stride_q_head, rows, live, stride_q_row, KEY_DIM, BLOCK_K)
            values = load_columns(v + head * stride_v_head, rows, live, stride_v_row, value, VALUE_DIM)
            gate, between, after, whole = decays_of(
                log_decay + head * stride_decay_head, rows, live, stride_decay_row,
                tl.minimum(end - start - chunk * CHUNK, CHUNK), CONSTANT,
            )  # fmt: skip
            score = product(own_k, tl.trans(own_q), None, PRECISION)
            later = index[None, :] >= index[:, None]
            score *= tl.exp2(tl.where(later, between, -float("inf")))
            seen = product(convert(held, dtype), tl.trans(own_q), None, PRECISION) * tl.exp2(gate)[None, :]
            seen = product(values, convert(score, dtype), seen, PRECISION)
            store_columns(out + head * VALUE_DIM, rows, live, HEADS * VALUE_DIM, value, seen, VALUE_DIM)
            kept = values.to(tl.float32) * tl.exp2(after)[None, :]
            held = product(convert(kept, dtype), own_k, held * tl.exp2(whole), PRECISION)
        tl.store(own, convert(held, state.dtype.element_ty), mask=exists)
