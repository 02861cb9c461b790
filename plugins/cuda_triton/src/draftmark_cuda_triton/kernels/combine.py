"""Combine the partial results of every request that the schedule split.

    splits   c-1        c         c+1       The schedule lists the requests in several splits, their first split and
            ──┼────┬────┼─────────┼──┬──    their number of parts. One program per (block of rows, block of columns,
              │    └── request ───┘         KV head, listed request).

    out = Σ 2^(lse_i - lse) · out_i ,   lse = log2 Σ 2^lse_i ,   out · 2^lse / (2^lse + 2^sink) with sinks

A program is one warp. Its threads hold the same rows and columns of every part, so no sum passes through shared memory.
The program reads the schedule before it waits for the attention kernel (programmatic dependent launch).
Bytes: each partial result once, splits · rows · dim · 4. Example: 1 request x 32768 tokens, 8 rows x 32 heads in 33
splits. 4.3 MB from L2 take 1 µs, so the launch dominates.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import inline
from .reduce import largest, total
from .softmax import sink_weight
from .split_kv import request_rows


@inline
def add_parts(
    sums,
    partial_out,
    partial_lse,
    done,
    first_split,
    num_parts,
    partial_half,
    num_kv_heads,
    head,
    partial_rows,
    packed,
    allocated,
    live,
    col,
    VALUE_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Add the parts [done, done + COUNT) of a request to the sums of its rows: acc, row_max, row_sum.

    A split has HALVES partial results: 2 if requests share splits, otherwise 1.
    """
    acc, row_max, row_sum = sums
    part = done + tl.arange(0, COUNT)
    partial = (first_split + part) * HALVES + tl.where(part == 0, partial_half, 0)
    cell = (partial * num_kv_heads + head)[:, None] * partial_rows + packed[None, :]
    exists = (part < num_parts)[:, None]
    cell_live = exists & allocated[None, :]
    weight = tl.load(partial_lse + cell, mask=exists & live[None, :], other=float("-inf"))
    values = tl.load(
        partial_out + cell.to(tl.int64)[:, :, None] * VALUE_DIM + col[None, None, :],
        mask=cell_live[:, :, None] & (col < VALUE_DIM)[None, None, :],
        other=0.0,
    )
    new_row_max = tl.maximum(row_max, largest(weight, 0))
    pivot = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weight = tl.exp2(weight - pivot[None, :])
    old_scale = tl.exp2(row_max - pivot)
    row_sum = row_sum * old_scale + total(weight, 0)
    acc = acc * old_scale[:, None] + total(weight[:, :, None] * values, 0)
    return acc, new_row_max, row_sum


@inline
def combine_block(
    partial_out,
    partial_lse,
    sinks,
    out,
    lse,
    row_begin,
    row_end,
    first_packed,
    first_split,
    num_parts,
    partial_half,
    num_kv_heads,
    head,
    group,
    partial_rows,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HALVES: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Combine the parts of one block of rows and columns, BLOCK_SPLITS parts a step, and store the result.

    Args:
        row_begin: first row of the request.
        row_end: packed rows of the request.
        first_packed: packed row of the request at which the partial results begin.
    """
    COLS: tl.constexpr = (VALUE_DIM + BLOCK_COLS - 1) // BLOCK_COLS
    begin = tl.program_id(0) // COLS * BLOCK_ROWS
    if first_packed + begin < row_end:
        packed = begin + tl.arange(0, BLOCK_ROWS)
        # Partial results of the block's rows after the last one are read, but not stored: a mask for each row would
        # cost more than it saves.
        allocated = packed < partial_rows
        row_of_all = first_packed + packed
        live = allocated & (row_of_all < row_end)
        col = tl.program_id(0) % COLS * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        column_live = col < VALUE_DIM
        row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        row_sum = tl.full([BLOCK_ROWS], 0.0, tl.float32)
        acc = tl.full([BLOCK_ROWS, BLOCK_COLS], 0.0, tl.float32)
        sums = (acc, row_max, row_sum)
        done = 0
        while done < num_parts:
            # Most requests of a batch have few parts, and a program is as slow as the instructions of its largest step.
            if num_parts - done > BLOCK_SPLITS // 2:
                sums = add_parts(
                    sums, partial_out, partial_lse, done, first_split, num_parts, partial_half, num_kv_heads, head,
                    partial_rows, packed, allocated, live, col, VALUE_DIM, BLOCK_SPLITS, HALVES,
                )  # fmt: skip
            else:
                sums = add_parts(
                    sums, partial_out, partial_lse, done, first_split, num_parts, partial_half, num_kv_heads, head,
                    partial_rows, packed, allocated, live, col, VALUE_DIM, BLOCK_SPLITS // 2, HALVES,
                )  # fmt: skip
            done += BLOCK_SPLITS
        acc, row_max, row_sum = sums
        row_index = row_begin + row_of_all // group
        head_of_row = head * group + row_of_all % group
        total_weight = row_sum
        if SINKS:
            # The sinks of a split request are added here, not in the attention kernel: there each part would add them
            # again.
            total_weight += sink_weight(sinks, head_of_row, live, row_max)
        acc = acc / tl.where(total_weight > 0, total_weight, 1.0)[:, None]
        out_rows = row_index.to(tl.int64)[:, None] * stride_out_row + head_of_row[:, None] * stride_out_head
        tl.store(
            out + out_rows + col[None, :], convert(acc, out.dtype.element_ty), mask=live[:, None] & column_live[None, :]
        )
        if WITH_LSE:
            log_sum = tl.where(row_sum > 0, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
            first = tl.program_id(0) % COLS == 0
            tl.store(lse + row_index * stride_lse_row + head_of_row, log_sum, mask=live & first)


@triton.jit(
    do_not_specialize=["q_len", "group", "num_splits", "stride_lse_row", "use_half"],
    do_not_specialize_on_alignment=["work", "q_indptr", "sinks", "lse"],
)
def combine_splits(
    partial_out,
    partial_lse,
    work,
    q_indptr,
    sinks,
    out,
    lse,
    q_len,
    group,
    num_splits,
    partial_rows,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    use_half,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    HALF_ROWS: tl.constexpr,
    HALF_COLS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PDL: tl.constexpr,
    EVERY_REQUEST: tl.constexpr,
):
    """Combine partial_out and partial_lse of `decode_verify.attend_decode_verify` or prefill into out and lse.

    Args:
        work: records of `tile_schedule.write_metadata_decode_verify` or `write_metadata_prefill`. program_id(2) is the
            index of a combine record; these follow the splits.
        q_len: rows of each request; 0 if they come from q_indptr, as in prefill.
        partial_rows: packed rows of a partial result (row tiles · BLOCK_M), a multiple of 16.
        use_half: 1 if a program reads BLOCK_SPLITS // 2 parts a step, for HALF_ROWS rows and HALF_COLS columns. 0 if it
            reads BLOCK_SPLITS parts, for BLOCK_ROWS rows and BLOCK_COLS columns.
        EVERY_REQUEST: each request has `num_splits` splits of its own, and `work` is not read.
    """
    HALVES: tl.constexpr = 1 if EVERY_REQUEST else 2
    head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    if EVERY_REQUEST:
        request, num_parts, place = tl.program_id(2), num_splits, 0
        first_split = request * num_splits
    else:
        record = work + (num_splits + tl.program_id(2)) * 4
        request = tl.load(record)
        first_split = tl.load(record + 1)
        num_parts = tl.load(record + 2)
        place = tl.load(record + 3)
    # Half 0 of a split's partial results belongs to the first request in the split, half 1 to the last one.
    partial_half = place % 2
    request = tl.where(num_parts > 0, request, 0)
    row_begin, rows, _ = request_rows(q_indptr, request, q_len, 0, q_len == 0)
    first_packed = place // 2 * partial_rows
    if PDL:  # noqa: SIM102
        # One program waits for the attention kernel even if nothing must be combined. The next grid waits only for this
        # grid, so this grid must not end before the attention kernel does.
        if (num_parts > 0) | (tl.program_id(0) + head + tl.program_id(2) == 0):
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    if num_parts > 0:
        row_end = rows * group
        if use_half != 0:
            combine_block(
                partial_out, partial_lse, sinks, out, lse, row_begin, row_end, first_packed, first_split, num_parts,
                partial_half, num_kv_heads, head, group, partial_rows, stride_out_row, stride_out_head, stride_lse_row,
                VALUE_DIM, HALF_ROWS, HALF_COLS, BLOCK_SPLITS // 2, HALVES, SINKS, WITH_LSE,
            )  # fmt: skip
        else:
            combine_block(
                partial_out, partial_lse, sinks, out, lse, row_begin, row_end, first_packed, first_split, num_parts,
                partial_half, num_kv_heads, head, group, partial_rows, stride_out_row, stride_out_head, stride_lse_row,
                VALUE_DIM, BLOCK_ROWS, BLOCK_COLS, BLOCK_SPLITS, HALVES, SINKS, WITH_LSE,
            )  # fmt: skip
