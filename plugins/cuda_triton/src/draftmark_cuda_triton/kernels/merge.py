"""Merge the pieces of every request that the schedule cut.

    pieces   c-1        c         c+1       The schedule says which requests were cut, from which piece on, and into how
            ──┼────┬────┼─────────┼──┬──    many: one program per (block of rows, block of columns, KV head, cut
              │    └── request ───┘         request).

    out = Σ 2^(lse_i - lse) · out_i ,   lse = log2 Σ 2^lse_i ,   out · 2^lse / (2^lse + 2^sink) where there are sinks

A program is one warp, whose threads hold the same rows and columns of every piece, so that nothing of a sum passes
through shared memory. The schedule is read before waiting for the attention (PDL).
Bytes: each partial once, pieces · rows · dim · 4. Worked size, 1 request x 32768, 8 rows x 32 heads on 33 pieces:
4.3 MB from L2, 1 µs, so a launch is the floor.
"""

import triton
import triton.language as tl

from .convert import convert
from .reduce import largest, total
from .schedule import HEADER
from .split import in_line, rows_of
from .tile import sink_mass


@triton.jit(do_not_specialize=["q_len", "pieces"])
def merge_pieces(
    partial_out,
    partial_lse,
    work,
    q_indptr,
    row_tiles,
    sinks,
    out,
    lse,
    q_len,
    group,
    pieces,
    height,
    stride_out_row,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    RAGGED: tl.constexpr,
    CUT: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial_out, partial_lse of `uniform.attend_uniform` → out, lse.

    Args:
        work: of `schedule.write_uniform`; program_id(2) counts the requests behind its pieces. If row tiles are CUT, of
            `schedule.write_ragged`, as row_tiles is, and it counts those.
        height: packed rows that a partial has room for (row tiles · BLOCK_M).
    """
    COLS: tl.constexpr = (HEAD_DIM + BLOCK_COLS - 1) // BLOCK_COLS
    head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    cut = work + (pieces + tl.program_id(2)) * 4
    request = tl.load(cut)
    holder = tl.load(cut + 1)
    parts = tl.load(cut + 2)
    # Half 0 of a piece holds what it begins with, half 1 what comes later in it.
    half = tl.load(cut + 3)
    if RAGGED:
        request = tl.where(parts > 0, request, 0)
    above = 0
    if CUT:
        # What was cut is a row tile.
        cut_tile = row_tiles + HEADER + in_line(request, tl.load(row_tiles + 1), tl.load(row_tiles + 3)) * 2
        above = tl.load(cut_tile + 1) * height
        request = tl.load(cut_tile)
    row_begin, rows, _ = rows_of(q_indptr, request, q_len, 0, RAGGED)
    if PDL:  # noqa: SIM102
        # One waits whatever there is to do: who comes next waits for this grid, and means the attention.
        if (parts > 0) | (tl.program_id(0) + head + tl.program_id(2) == 0):
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    if parts > 0:
        packed = tl.program_id(0) // COLS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_of_all = packed
        live = packed < rows * group
        if CUT:
            row_of_all = above + packed
            live = (row_of_all < rows * group) & (packed < height)
        col = tl.program_id(0) % COLS * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        column_live = col < HEAD_DIM
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        mass = tl.full([BLOCK_ROWS], 0.0, tl.float32)
        acc = tl.full([BLOCK_ROWS, BLOCK_COLS], 0.0, tl.float32)
        part = tl.arange(0, BLOCK_PIECES)
        merged = 0
        while merged < parts:
            place = (holder + part) * 2 + tl.where(part == 0, half, 0)
            cell = (place * num_kv_heads + head)[:, None] * height + packed[None, :]
            cell_live = (part < parts)[:, None] & live[None, :]
            weight = tl.load(partial_lse + cell, mask=cell_live, other=float("-inf"))
            values = tl.load(
                partial_out + cell.to(tl.int64)[:, :, None] * HEAD_DIM + col[None, None, :],
                mask=cell_live[:, :, None] & column_live[None, None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, largest(weight, 0))
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(weight - pivot[None, :])
            shrink = tl.exp2(top - pivot)
            mass = mass * shrink + total(weight, 0)
            acc = acc * shrink[:, None] + total(weight[:, :, None] * values, 0)
            top = new_top
            merged += BLOCK_PIECES
            part += BLOCK_PIECES
        row_index = row_begin + row_of_all // group
        head_of_row = head * group + row_of_all % group
        weight_of_all = mass
        if SINKS:
            # Here and in no piece: a sink that every piece counted would count as often as the schedule cuts.
            weight_of_all += sink_mass(sinks, head_of_row, live, top)
        acc = acc / tl.where(weight_of_all > 0, weight_of_all, 1.0)[:, None]
        out_rows = row_index.to(tl.int64)[:, None] * stride_out_row + head_of_row[:, None] * stride_out_head
        tl.store(
            out + out_rows + col[None, :], convert(acc, out.dtype.element_ty), mask=live[:, None] & column_live[None, :]
        )
        if WITH_LSE:
            log_mass = tl.where(mass > 0, (top + tl.log2(mass)) * 0.6931471805599453, float("-inf"))
            first = tl.program_id(0) % COLS == 0
            tl.store(lse + row_index * (num_kv_heads * group) + head_of_row, log_mass, mask=live & first)
