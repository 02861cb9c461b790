"""Ragged causal attention (EXTEND): prefill and chunks, prefix and new tokens in one pass.

    grid (row tiles · KV heads)       keys:  0 ────────── L ───────────── L+n
                                      tile:  │ seen by every row │ masked │ never loaded
    One program is one row tile of one request: BLOCK_M packed rows (tokens x group heads). The longest tiles of
    a request are launched first, and the heads of a tile side by side, so a request's KV stays in L2.

    Few row tiles may be cut by their keys as `split` cuts requests, so that no multiprocessor is idle while another
    walks over a long prefix: grid (pieces · KV heads), and `merge`.

Operations: 4 · heads · dim · pairs(row, key). Worked size, 8 requests x 4096 tokens, 32 heads of 128: 1.1 TFLOP,
1.4 ms at 790 TFLOP/s; the bytes (0.4 GB) are a tenth of that.
"""

import triton
import triton.language as tl

from .convert import convert
from .schedule import HEADER
from .split import in_line, tiles_of
from .tile import CAUSAL, Source, View, attend_range, sink_mass

ALL = tl.constexpr(1 << 30)
"""Tiles of keys, more than there are."""


@triton.jit(do_not_specialize=["stride_table", "pieces"])
def attend_ragged(
    q,
    k_source,
    v_source,
    k_scale,
    v_scale,
    sinks,
    out,
    lse,
    partial_out,
    partial_lse,
    work,
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
    pieces,
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
    CUT: tl.constexpr,
    ITEM_COST: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out ``[rows, heads, dim]`` (and lse fp32 ``[rows, heads]``, of the keys alone); row_tiles from
    `schedule.write_ragged`, of BLOCK_M packed rows (HEIGHT: the next power of two); sinks fp32 ``[heads]``, natural
    units. Where row tiles may be CUT, into as many pieces, work is from there too, and partials are those of
    `uniform.attend_uniform`, of one row tile.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, number = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    # Programs are as many as row tiles, or as pieces.
    entry, tile, by_line = number, number * 0, number * 0
    count = tl.load(row_tiles + 1)
    left = tl.where(number < count, ALL, 0)
    if CUT:
        by_line = tl.load(row_tiles + 3)
        piece = work + tl.minimum(number, pieces - 1) * 4
        entry = tl.where(by_line > 0, tl.load(piece), number)
        tile = tl.load(piece + 1)
        left = tl.where(by_line > 0, tl.where(number < pieces, tl.load(piece + 2), 0), left)
    col = tl.arange(0, BLOCK_D)
    k_factor, v_factor = 1.0, 1.0
    if SCALED & 1:
        k_factor = tl.load(k_scale)
    if SCALED & 2:
        v_factor = tl.load(v_scale)
    keys = Source(data=k_source, stride_page=stride_k_page, stride_slot=stride_k_slot, stride_head=stride_k_head)
    values = Source(data=v_source, stride_page=stride_v_page, stride_slot=stride_v_slot, stride_head=stride_v_head)
    half = number * 0
    while left > 0:
        row_tile = row_tiles + HEADER + in_line(entry, count, by_line) * 2
        request, m = tl.load(row_tile), tl.load(row_tile + 1)
        begin = tl.load(q_indptr + request)
        rows = tl.load(q_indptr + request + 1) - begin
        prefix_len = tl.load(prefix_lens + request)
        first, end = tiles_of(m, rows, prefix_len, group, window_left, BLOCK_M, BLOCK_N, WINDOW)
        if by_line == 0:
            tile = first
        stop = tl.minimum(tile + left, end)
        # Otherwise the piece begins in the surplus of a row tile that others have done.
        if tile < end:
            lane = tl.arange(0, HEIGHT)
            packed = m * BLOCK_M + lane
            row = packed // group
            row_live = row < rows
            if HEIGHT > BLOCK_M:
                row_live &= lane < BLOCK_M
            row_index = begin + row
            head_of_row = head * group + packed % group
            cell_live = row_live[:, None] & (col < HEAD_DIM)[None, :]
            q_rows = row_index.to(tl.int64)[:, None] * stride_q_row + head_of_row[:, None] * stride_q_head
            queries = tl.load(q + q_rows + col[None, :], mask=cell_live, other=0.0)
            clear = (prefix_len + m * BLOCK_M // group + 1) // BLOCK_N
            clear = tl.minimum(tl.maximum(clear, tile), stop)
            page_row = page_table + request.to(tl.int64) * stride_table
            # No tree: there are neither words nor depths.
            view = View(
                prefix_len=prefix_len, tail_len=rows, slot_of_row=row, row_position=prefix_len + row, row_live=row_live,
                row_words=row_tiles, depths=row_tiles, mask_words=0, window_left=window_left,
            )  # fmt: skip
            acc, top, mass = attend_range(
                queries, tile, clear, stop, keys, values, page_row, head, view, scale * k_factor, cap, PAGE, BLOCK_N,
                HEAD_DIM, BLOCK_D, CAUSAL, WINDOW, CAP, USE_TMA, STAGES,
            )  # fmt: skip
            log_mass = tl.where(mass > 0, top + tl.log2(mass), float("-inf"))
            whole = (tile == first) & (stop == end)
            weight = mass
            if SINKS:
                weight += sink_mass(sinks, head_of_row, row_live & whole, top)
            acc = acc * (v_factor / tl.where(weight > 0, weight, 1.0))[:, None]
            if whole:
                out_rows = row_index.to(tl.int64)[:, None] * stride_out_row + head_of_row[:, None] * stride_out_head
                tl.store(out + out_rows + col[None, :], convert(acc, out.dtype.element_ty), mask=cell_live)
                if WITH_LSE:
                    cell = row_index * (num_kv_heads * group) + head_of_row
                    tl.store(lse + cell, log_mass * 0.6931471805599453, mask=row_live)
            else:
                block = ((number * 2 + half) * num_kv_heads + head) * BLOCK_M + lane
                tl.store(partial_lse + block, log_mass, mask=row_live)
                tl.store(partial_out + block.to(tl.int64)[:, None] * HEAD_DIM + col[None, :], acc, mask=cell_live)
        half = half * 0 + 1
        entry += 1
        left = tl.where(by_line > 0, left - (end + ITEM_COST - tile), 0)
        if CUT:  # noqa: SIM102
            if left > 0:
                row_tile = row_tiles + HEADER + in_line(entry, count, by_line) * 2
                request = tl.load(row_tile)
                rows = tl.load(q_indptr + request + 1) - tl.load(q_indptr + request)
                tile, _ = tiles_of(
                    tl.load(row_tile + 1), rows, tl.load(prefix_lens + request), group, window_left, BLOCK_M, BLOCK_N,
                    WINDOW,
                )  # fmt: skip
