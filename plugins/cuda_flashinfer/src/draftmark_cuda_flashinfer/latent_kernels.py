"""Triton kernels for latent rows: slots, the KV store, and the pass over a request's tail.

* `write_slots` runs once per forward, `write_latent_rows` and `attend_tail` once per layer.
* `attend_tail` continues the softmax of FlashInfer's pass over the prefix, so no partial result is merged later. A
  program processes BLOCK_M packed rows (query row x head) of one request against the tail slots that they may see. For
  16 rows of 128 heads a program reads 36 KiB of queries, 32 KiB of prefix output and 18 KiB of latent rows.

All are plain functions. `launch` compiles them for a GPU and interprets them for CPU tensors.
"""

import triton.language as tl


def write_slots(
    prefix_lens, q_indptr, page_table, slot_mapping, tail_len, stride_table,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write slot_mapping, int64 ``[rows]``: the slot of each row's key. A RAGGED request has one tail slot per row."""
    r = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row0 = tl.load(q_indptr + r)
    rows = tl.load(q_indptr + r + 1) - row0
    tail = rows if RAGGED else tail_len
    stored = at < rows
    position = tl.load(prefix_lens + r) + tail - rows + at
    page = tl.load(page_table + r.to(tl.int64) * stride_table + position // PAGE, mask=stored, other=0).to(tl.int64)
    tl.store(slot_mapping + row0 + at, page * PAGE + position % PAGE, mask=stored)


def write_latent_rows(
    k, values, rest, slot_mapping, stride_k_row, stride_value_page, stride_value_row, stride_rest_page, stride_rest_row,
    PAGE: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows k ``[rows, HEAD_DIM]`` to their slots: the first VALUE elements to values, all others to rest."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    page, at = slot // PAGE, slot % PAGE
    element = tl.arange(0, BLOCK)
    new = tl.load(k + row * stride_k_row + element, mask=element < HEAD_DIM)
    to_values = values + page * stride_value_page + at * stride_value_row + element
    to_rest = rest + page * stride_rest_page + at * stride_rest_row + element - VALUE
    tl.store(to_values, new, mask=element < VALUE)
    tl.store(to_rest, new, mask=(element >= VALUE) & (element < HEAD_DIM))


def attend_tail(
    q, parts, results, tree_mask, batch,
    scale, tail_len, num_heads, strides_q, strides_value, strides_rest, stride_table, stride_mask,
    PAGE: tl.constexpr, VALUE: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add the visible tail slots of draft trees to attention over the prefix.

    Args:
        q: ``[rows, num_heads, VALUE + REST]``.
        parts: ``[pages, PAGE, VALUE]`` and ``[pages, PAGE, REST]``, the two parts of latent rows.
        results: out ``[rows, num_heads, VALUE]``, contiguous, and lse, float32 ``[rows, num_heads]``, natural. In:
            attention over the prefix. Out: over prefix and tail.
        tree_mask: int32 ``[rows, words]``.
        batch: prefix_lens, q_indptr and page_table of the batch, int32.
        strides_q, strides_value, strides_rest: strides of row and head, and of page and row.
        scale: softmax scale · log2(e).
        tail_len: tail slots of each request.
        UPCAST: multiply in float32: Triton's interpreter has no bf16 products.
    """
    values, rest = parts
    out, lse = results
    prefix_lens, q_indptr, page_table = batch
    stride_q_row, stride_q_head = strides_q
    stride_value_page, stride_value_row = strides_value
    stride_rest_page, stride_rest_row = strides_rest
    kind = tl.float32 if UPCAST else q.dtype.element_ty
    r = tl.program_id(0)
    row0 = tl.load(q_indptr + r).to(tl.int64)
    rows = tl.load(q_indptr + r + 1).to(tl.int32) - row0.to(tl.int32)
    first = tl.program_id(1) * BLOCK_M
    if first < rows * num_heads:
        packed = first + tl.arange(0, BLOCK_M)
        live = packed < rows * num_heads
        row, head = packed // num_heads, packed % num_heads
        prefix = tl.load(prefix_lens + r)
        dims = tl.arange(0, VALUE)
        q_row = q + (row0 + row) * stride_q_row + head * stride_q_head
        q_value = tl.load(q_row[:, None] + dims[None, :], mask=live[:, None], other=0.0).to(kind)
        place = (row0 + row) * num_heads + head
        old = tl.load(lse + place, mask=live, other=float("-inf"))
        total = tl.where(old == float("-inf"), 0.0, 1.0)
        top = old * 1.4426950408889634
        acc = tl.load(out + place[:, None] * VALUE + dims[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        acc = acc * total[:, None]
        # No row sees a slot after its own: the loop ends at the last row's own slot.
        end = tl.minimum(tail_len - rows + (first + BLOCK_M - 1) // num_heads + 1, tail_len)
        for start in range(0, end, BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            inside = slot < tail_len
            position = prefix + slot
            page = tl.load(page_table + r.to(tl.int64) * stride_table + position // PAGE, mask=inside, other=0)
            page, at = page.to(tl.int64), position % PAGE
            rows_of_values = values + page * stride_value_page + at * stride_value_row
            key_value = tl.load(rows_of_values[:, None] + dims[None, :], mask=inside[:, None], other=0.0).to(kind)
            scores = tl.dot(q_value, tl.trans(key_value))
            if REST > 0:
                more = tl.arange(0, REST)
                q_rest = tl.load(q_row[:, None] + VALUE + more[None, :], mask=live[:, None], other=0.0).to(kind)
                rows_of_rest = rest + page * stride_rest_page + at * stride_rest_row
                key_rest = tl.load(rows_of_rest[:, None] + more[None, :], mask=inside[:, None], other=0.0).to(kind)
                scores += tl.dot(q_rest, tl.trans(key_rest))
            seen = inside[None, :] & live[:, None]
            words = tree_mask + (row0 + row)[:, None] * stride_mask + (slot // 32)[None, :]
            seen = seen & (((tl.load(words, mask=seen, other=0) >> (slot % 32)[None, :]) & 1) == 1)
            scores = tl.where(seen, scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.reduce(scores, 1, tl.standard._elementwise_max))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.reduce(weights, 1, tl.standard._sum_combine)
            acc = acc * fade[:, None] + tl.dot(weights.to(kind), key_value)
            top = new_top
        share = tl.where(total > 0.0, total, 1.0)
        acc = acc / share[:, None]
        tl.store(out + place[:, None] * VALUE + dims[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
        natural = (top + tl.log2(share)) * 0.6931471805599453
        tl.store(lse + place, natural, mask=live)
