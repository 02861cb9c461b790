"""Epilogue of the Hopper kernels: scale the accumulator and store out, LSE and partial results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import num_column_parts, part_offset, part_width, row_io_layout
from .gluon_compat import thread_barrier
from .pack_gqa import head_columns, packed_cells, reciprocal, row_pointers


@gluon.jit
def scale_acc(acc, row_scale):
    """Multiply the accumulators by a factor for each row."""
    return [one * gl.convert_layout(row_scale, gl.SliceLayout(1, one.type.layout))[:, None] for one in acc]


@gluon.jit
def store_out(smem, acc, out, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """Store a warp group's output through q's shared memory, so that global memory is written in whole sectors."""
    thread_barrier()
    for part in gl.static_range(num_column_parts(CFG)):
        smem[part].store(acc[part].to(out.dtype.element_ty))
    thread_barrier()
    for part in gl.static_range(num_column_parts(CFG)):
        packed, own, live = packed_cells(first, count, group, inv_group, part, CFG)
        pointers = row_pointers(out, begin, packed, own, head, group, inv_group, stride_row, stride_head, CFG)
        gl.store(pointers, smem[part].load(row_io_layout(part_width(CFG, part))), mask=live)


@gluon.jit
def store_unsplit(args, CFG: gl.constexpr):
    """Store the output of rows that are not split, and with WITH_LSE their natural log-sum-exp."""
    (
        wg_q_smem, acc, row_max, row_sum, row_live, cells, out, lse, q_begin, first, count, head, group, inv_group,
        stride_row, stride_head,
    ) = args  # fmt: skip
    store_out(wg_q_smem, acc, out, q_begin, first, count, head, group, inv_group, stride_row, stride_head, CFG)
    if CFG.WITH_LSE:
        log_sum = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
        gl.store(lse + cells, log_sum, mask=row_live)


@gluon.jit
def store_partial_acc(
    acc, partial_out, cell, row_live, head_offset, group, inv_group, part: gl.constexpr, CFG: gl.constexpr
):
    """Store one column part of a warp group's normalized output to the partial results of its packed rows.

    cell: index of each packed row in `partial_out` ``[cells, HEAD_DIM]`` float32.
    """
    sums: gl.constexpr = acc.type.layout
    at = gl.convert_layout(cell, gl.SliceLayout(1, sums)).to(gl.int64)
    live = gl.convert_layout(row_live.to(gl.int32), gl.SliceLayout(1, sums)) != 0
    col = part_offset(CFG, part) + gl.arange(0, acc.shape[1], gl.SliceLayout(0, sums))
    lane = head_offset + gl.arange(0, 64, gl.SliceLayout(1, sums))
    own, there = head_columns(lane, col, group, inv_group, CFG)
    gl.store(partial_out + at[:, None] * CFG.HEAD_DIM + own, acc, mask=live[:, None] & there)


@gluon.jit
def zero_padding_rows(
    out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG: gl.constexpr
):  # fmt: skip
    """Store zeros, and -inf in lse, in the padding rows after the last request, for the query heads of one KV head."""
    head, split, num_splits = gl.program_id(1), gl.program_id(2), gl.num_programs(2)
    inv_group = reciprocal(group)
    for packed in range(gl.load(q_indptr + num_reqs) * group + split * 64, num_rows * group, num_splits * 64):
        row = packed // group
        for part in gl.static_range(num_column_parts(CFG)):
            at, own, there = packed_cells(packed - row * group, (num_rows - row) * group, group, inv_group, part, CFG)
            pointers = row_pointers(out, row, at, own, head, group, inv_group, stride_out_row, stride_out_head, CFG)
            gl.store(pointers, gl.full(there.shape, 0.0, out.dtype.element_ty, there.type.layout), mask=there)
        if CFG.WITH_LSE:
            lane: gl.constexpr = gl.SliceLayout(1, row_io_layout(part_width(CFG, 0)))
            at = packed + gl.arange(0, 64, lane)
            row = at // group
            cell = (row * gl.num_programs(1) + head) * group + at - row * group
            gl.store(lse + cell, gl.full([64], float("-inf"), gl.float32, lane), mask=row < num_rows)
