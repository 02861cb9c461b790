"""Merge the pieces of every request that the schedule cut.

    pieces   c-1        c         c+1       The request that piece c begins inside of began in piece c-1 and may go
            ──┼────┬────┼─────────┼──┬──    on for more pieces. The first cut inside a request stands for it: one
              │    └── request ───┘         program per (block of rows, KV head, cut request).

    out = Σ 2^(lse_i - lse) · out_i ,   lse = log2 Σ 2^lse_i ,   out · 2^lse / (2^lse + 2^sink) where there are sinks

All that does not depend on the attention before it is read before waiting for that attention (PDL).
Bytes: each partial once, pieces · rows · dim · 4. Worked size, 1 request x 32768, 8 rows x 32 heads on 33 pieces:
4.3 MB from L2, 1 µs, so a launch is the floor.
"""

import triton
import triton.language as tl

from .convert import convert
from .reduce import largest, running_total, smallest, total
from .split import rows_of, tile_range
from .tile import sink_mass


@triton.jit(do_not_specialize=["q_len", "tail_len", "pieces", "window_left"])
def merge_pieces(
    partial_out,
    partial_lse,
    work,
    prefix_lens,
    q_indptr,
    sinks,
    out,
    lse,
    q_len,
    tail_len,
    group,
    pieces,
    height,
    window_left,
    stride_out_row,
    stride_out_head,
    TILE_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BY_REQUEST: tl.constexpr,
    BLOCK_CUTS: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial_out, partial_lse of `uniform.attend_uniform` → out, lse.

    Args:
        height: packed rows that a partial has room for (row tiles · BLOCK_M). TILE_N: that kernel's BLOCK_N.
        BY_REQUEST: program_id(2) is a request, which looks for its first cut; otherwise it is a cut.
    """
    head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    cut = tl.program_id(2) + 1
    if BY_REQUEST:
        number = tl.arange(0, BLOCK_CUTS)
        known = number < pieces
        owner = tl.load(work + number * 4, mask=known, other=-1)
        from_tile = tl.load(work + number * 4 + 1, mask=known, other=0)
        wanted = tl.program_id(2)
        _, _, slots = rows_of(q_indptr, wanted, q_len, tail_len, RAGGED)
        first, end = tile_range(tl.load(prefix_lens + wanted), slots, window_left, TILE_N, WINDOW, RAGGED)
        inside = (owner == wanted) & (from_tile > first) & (from_tile < end)
        cut = smallest(tl.where(inside, number, BLOCK_CUTS), 0)
        cut = tl.where(cut < pieces, cut, 0)
    request = tl.load(work + cut * 4)
    tile = tl.load(work + cut * 4 + 1)
    length = tl.load(work + cut * 4 + 2)
    previous = tl.maximum(cut - 1, 0)
    reached = tile - tl.load(work + previous * 4 + 2)
    who = previous + tl.arange(0, BLOCK_PIECES)
    lengths = tl.load(work + who * 4 + 2, mask=who < pieces, other=0)
    row_begin, rows, slots = rows_of(q_indptr, request, q_len, tail_len, RAGGED)
    first, end = tile_range(tl.load(prefix_lens + request), slots, window_left, TILE_N, WINDOW, RAGGED)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # This cut lies inside a request, and the one before it does not.
    if (length > 0) & (tile > first) & (tile < end) & (reached <= first):
        packed = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = packed < rows * group
        col = tl.arange(0, BLOCK_D)
        column_live = col < HEAD_DIM
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        mass = tl.full([BLOCK_ROWS], 0.0, tl.float32)
        acc = tl.full([BLOCK_ROWS, BLOCK_D], 0.0, tl.float32)
        while reached < end:
            begin = reached + running_total(lengths) - lengths
            here = (lengths > 0) & (begin < end)
            # Half 0 holds what a piece begins with; the request comes later in a piece that began before it.
            half = tl.where(begin < first, 1, 0)
            cell = ((who * 2 + half) * num_kv_heads + head)[:, None] * height + packed[None, :]
            cell_live = here[:, None] & live[None, :]
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
            reached += total(lengths, 0)
            who += BLOCK_PIECES
            lengths = tl.load(work + who * 4 + 2, mask=who < pieces, other=0)
        row_index = row_begin + packed // group
        head_of_row = head * group + packed % group
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
            tl.store(lse + row_index * (num_kv_heads * group) + head_of_row, log_mass, mask=live)
