"""Kernels that move rows: a draft step's rows to staging buffers and back, and latent rows to their KV slots.

`write_scale` computes XQA's scale of the queries.

For example, 256 requests of 8 rows of 32 heads of 128 in bf16 read and write 16 MiB each, in 8 µs at 4.2 TB/s.
"""

import triton
import triton.language as tl


@triton.jit
def move_rows(source, target, q_len, source_lanes, target_lanes, row_elements, BLOCK: tl.constexpr):
    """Copy row j of request r from row ``r · source_lanes + j`` of `source` to ``r · target_lanes + j`` of `target`."""
    number = tl.program_id(0).to(tl.int64)
    request, row = number // q_len, number % q_len
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = element < row_elements
    value = tl.load(source + (request * source_lanes + row) * row_elements + element, mask=live)
    tl.store(target + (request * target_lanes + row) * row_elements + element, value, mask=live)


@triton.jit
def write_scale(k_scale, v_scale, q_scale, factor, HAS_K: tl.constexpr, HAS_V: tl.constexpr):
    """Write q_scale, float32 ``[1]``: factor · k_scale / v_scale. XQA multiplies logits by q_scale and by v_scale."""
    value = factor
    if HAS_K:
        value = value * tl.load(k_scale)
    if HAS_V:
        value = value / tl.load(v_scale)
    tl.store(q_scale, value)


@triton.jit
def write_latent_rows(k, cache, slot_mapping, stride_k_row, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows k ``[rows, ROW]`` to their slots of cache ``[slots, ROW]``; a slot of -1 stores nothing."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    element = tl.arange(0, BLOCK)
    live = (element < ROW) & (slot >= 0)
    tl.store(cache + slot * ROW + element, tl.load(k + row * stride_k_row + element, mask=live), mask=live)
