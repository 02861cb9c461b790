"""Ragged causal attention (EXTEND): prefill and chunks, prefix and new tokens in one pass.

    grid (row tiles · KV heads)       keys:  0 ────────── L ───────────── L+n
                                      tile:  │ seen by every row │ masked │ never loaded
    One program is one row tile of one request: BLOCK_M packed rows (tokens x group heads). The longest tiles of
    a request are launched first, and the heads of a tile side by side, so a request's KV stays in L2.

Operations: 4 · heads · dim · pairs(row, key). Worked size, 8 requests x 4096 tokens, 32 heads of 128: 1.1 TFLOP,
1.4 ms at 790 TFLOP/s; the bytes (0.4 GB) are a tenth of that.
"""

import triton
import triton.language as tl

from .convert import convert
from .schedule import HEADER
from .tile import CAUSAL, attend_range, sink_mass


@triton.jit(do_not_specialize=["stride_table"])
def attend_ragged(
    q,
    k_source,
    v_source,
    k_scale,
    v_scale,
    sinks,
    out,
    lse,
    row_tiles,
    prefix_lens,
    q_indptr,
    page_table,
    group,
    num_kv_heads,
    window_left,
    scale,
    cap,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
    stride_table,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WITH_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out ``[rows, heads, dim]`` (and lse fp32 ``[rows, heads]``, of the keys alone); row_tiles from
    `schedule.write_ragged`, of BLOCK_M packed rows (HEIGHT: the next power of two); sinks fp32 ``[heads]``, natural
    units.
    """
    head, entry = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    request = tl.load(row_tiles + HEADER + entry * 2)
    m = tl.load(row_tiles + HEADER + entry * 2 + 1)
    if request < 0:
        return
    begin = tl.load(q_indptr + request)
    rows = tl.load(q_indptr + request + 1) - begin
    prefix_len = tl.load(prefix_lens + request)

    packed = m * BLOCK_M + tl.arange(0, HEIGHT)
    row = packed // group
    row_live = row < rows
    if HEIGHT > BLOCK_M:
        row_live &= tl.arange(0, HEIGHT) < BLOCK_M
    row_index = begin + row
    head_of_row = head * group + packed % group
    col = tl.arange(0, BLOCK_D)
    cell_live = row_live[:, None] & (col < HEAD_DIM)[None, :]
    q_rows = row_index.to(tl.int64)[:, None] * stride_q_row + head_of_row[:, None] * stride_q_head
    queries = tl.load(q + q_rows + col[None, :], mask=cell_live, other=0.0)
    k_factor, v_factor = 1.0, 1.0
    if SCALED & 1:
        k_factor = tl.load(k_scale)
    if SCALED & 2:
        v_factor = tl.load(v_scale)

    lowest = m * BLOCK_M // group
    highest = tl.minimum((m * BLOCK_M + BLOCK_M - 1) // group, rows - 1)
    first = 0
    if WINDOW:
        first = tl.maximum(prefix_len + lowest - window_left, 0) // BLOCK_N
    stop = (prefix_len + highest + BLOCK_N) // BLOCK_N
    clear = tl.minimum((prefix_len + lowest + 1) // BLOCK_N, stop)
    acc = tl.full([HEIGHT, BLOCK_D], 0.0, tl.float32)
    top = tl.full([HEIGHT], float("-inf"), tl.float32)
    mass = tl.full([HEIGHT], 0.0, tl.float32)
    page_row = page_table + request.to(tl.int64) * stride_table
    acc, top, mass = attend_range(
        acc, top, mass, queries, first, clear, stop, k_source, v_source, page_row, head, prefix_len, rows,
        row, prefix_len + row, row_live, row_tiles, row_tiles, 0, window_left, scale * k_factor, cap, stride_k_page,
        stride_k_slot, stride_k_head, stride_v_page, stride_v_slot, stride_v_head, PAGE, BLOCK_N, HEAD_DIM, BLOCK_D,
        CAUSAL, WINDOW, CAP, USE_TMA, STAGES,
    )  # fmt: skip
    weight = mass
    if SINKS:
        weight += sink_mass(sinks, head_of_row, row_live, top)
    acc = acc * (v_factor / tl.where(weight > 0, weight, 1.0))[:, None]
    out_rows = row_index.to(tl.int64)[:, None] * stride_out_row + head_of_row[:, None] * stride_out_head
    tl.store(out + out_rows + col[None, :], convert(acc, out.dtype.element_ty), mask=cell_live)
    if WITH_LSE:
        log_mass = tl.where(mass > 0, (top + tl.log2(mass)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + row_index * (num_kv_heads * group) + head_of_row, log_mass, mask=row_live)
