"""Mainloop over e4m3 with operands A and B swapped: K and V are upcast in registers and are wgmma's A operand.

    K tile [keys, d]  ldmatrix  two fp16 operands [keys, d/2]      Sᵀ [keys, rows] = K · Qᵀ
    V tile [keys, d]  ldmatrix.trans  even, odd [d/2, keys]        Oᵀ [d/2, rows] += Vᵀ · Pᵀ, for even d, for odd d

Nothing wide is written to shared memory, through which `producer_upcast.upcast_tiles` takes each tile three times. Two
e4m3 values are one element of 16 bits to ldmatrix. Those of K are neighbours in d, over which a product sums in any
order: one instruction widens them, and the columns of q stand in that order. Those of V are neighbours in d, the
operand's
rows: the bytes of two keys are sorted first.

fp16 holds e4m3 exactly, NaN too. The rows of q become fp16 after one power of two has scaled them: what that drops is
2**-39 of the largest of them, less than fp32 sums do. Weights become fp16, which is finer than bf16.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .config import row_io_layout
from .gluon_compat import reinterpret, thread_barrier
from .mask import TREE, visible_keys
from .pack_gqa import head_columns, row_pointers, split_packed_row
from .pipeline import advance, release
from .softmax import apply_soft_cap, score_unit

UNSEEN_MAX = gl.constexpr(-1e30)
"""Exponent that a row's weights stand at before it has seen a key; finite, for -inf - -inf is NaN."""
MAX_WEIGHT_LOG2 = gl.constexpr(15.0)
"""A weight is 2**MAX_WEIGHT_LOG2 at most, the largest power of two in fp16."""
ROW_MAX_LOG2 = gl.constexpr(6.0)
"""Where the heaviest key seen stands, 2**ROW_MAX_LOG2: sums are rescaled when one comes that is 2**9 times as heavy."""


class RequestRows(NamedTuple):
    """Of a request whose rows are one row tile, what says which keys each row sees, int32 where nothing is said.

    Attributes:
        group, inv_group: query heads of a KV head, as `pack_gqa.split_packed_row` takes them.
        begin, rows: the request's first row, and how many it has.
        prefix_len, tail_len: its keys before the tail, and in it.
        tail_mask, mask_words: of a tree, pointer to the mask of all rows, and words of each.
        depths: of a tree, pointer to the depths of the tail's slots.
        window_left: tokens left of its own that a row sees.
    """

    group: gl.tensor
    inv_group: gl.tensor
    begin: gl.tensor
    rows: gl.tensor
    prefix_len: gl.tensor
    tail_len: gl.tensor
    tail_mask: gl.tensor
    depths: gl.tensor
    mask_words: gl.tensor
    window_left: gl.tensor


@gluon.jit
def upcast_k(x):
    """int16 ``[keys, d/2]`` of two e4m3 each to fp16: columns 2c and 2c+1 are d 4c and 4c+1, and 4c+2 and 4c+3."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def upcast_v(x):
    """int16 ``[d/2, keys]`` of two e4m3 each to fp16: the even d, and the odd ones."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def apply_mask_transposed(s, tile, request_rows, CFG: gl.constexpr, scores: gl.constexpr):
    """`mask.apply_mask` of scores ``[keys, rows]``. What a row sees is worked out by threads that have one row each:
    those of the scores have a quarter of the rows, whose numbers would take the registers of every tile.
    """
    NUM_ROWS: gl.constexpr = s.shape[1]
    row_layout: gl.constexpr = gl.BlockedLayout([1, NUM_ROWS // 2], [NUM_ROWS // 4, 128 // NUM_ROWS], [4, 1], [1, 0])
    row, _ = split_packed_row(
        gl.arange(0, NUM_ROWS, gl.SliceLayout(1, row_layout)), request_rows.group, request_rows.inv_group
    )
    row_live = row < request_rows.rows
    slot_of_row = request_rows.tail_len - request_rows.rows + row
    row_position = request_rows.prefix_len + slot_of_row
    if CFG.TAIL_KIND == TREE and CFG.WINDOW:
        row_position = request_rows.prefix_len + gl.load(request_rows.depths + slot_of_row, mask=row_live, other=0)
    words = request_rows.tail_mask + (request_rows.begin + row).to(gl.int64) * request_rows.mask_words
    seen = visible_keys(
        tile, request_rows.prefix_len, request_rows.tail_len, slot_of_row, row_position, row_live, words,
        request_rows.depths, request_rows.mask_words, request_rows.window_left, CFG, row_layout,
    )  # fmt: skip
    seen = gl.convert_layout(gl.permute(seen.to(gl.int8), (1, 0)), scores) != 0
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def load_q_fp16(
    q_smem, q, begin, packed, live, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr,
    layout: gl.constexpr
):  # fmt: skip
    """Packed rows of q as two fp16 operands of the order of `upcast_k`; what scores are to be multiplied by."""
    col = gl.arange(0, CFG.BLOCK_D // 2, gl.SliceLayout(0, layout))
    col = col // 2 * 4 + col % 2
    # Four that begin at a multiple of four are all of one head, or all of none.
    elements, there = head_columns(packed, col, group, inv_group, CFG)
    pointers = row_pointers(q, begin, packed, elements, head, group, inv_group, stride_row, stride_head, CFG)
    low = gl.load(pointers, mask=live[:, None] & there, other=0.0).to(gl.float32)
    high = gl.load(pointers + 2, mask=live[:, None] & there, other=0.0).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
    # An infinite row stays infinite, and leaves the others as they are.
    largest = gl.max(gl.where(largest < float("inf"), largest, 0.0), 0)
    # The power of two of the largest value becomes 2**14.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    thread_barrier()
    q_smem.index(0).store((low * factor).to(gl.float16))
    q_smem.index(1).store((high * factor).to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def partial_row_sums(p):
    """Sums of two weights ``[keys / 16, 8, rows]``, which one thread has: half the registers, nothing exchanged."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def rescale_row_sum(row_sum, old_scale):
    """`partial_row_sums` times a factor for each row."""
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, row_sum.type.layout))
    return row_sum * gl.convert_layout(old_scale, rows)[None, None, :]


@gluon.jit
def any_above(x, limit, flags):
    """Whether any of ``[keys, rows]`` is above `limit`: a thread looks at its own, one instruction a warp asks
    its threads, and every thread reads what the four warps have found.
    """
    NUM_ROWS: gl.constexpr = x.shape[1]
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    thread_max = gl.reshape(x, [4, 2, 8, NUM_ROWS // 8, 4, 2])
    thread_max = gl.max(gl.max(gl.max(thread_max, 5), 3), 1)
    flags.store(gl.max(gl.reshape((thread_max > limit).to(gl.int32), [4, 32]), 1))
    thread_barrier()
    return gl.max(flags.load(everywhere), 0) != 0


@gluon.jit
def online_softmax_fp8(state, s, is_first, weights, flags, unit, MASKED: gl.constexpr):
    """Scores to weights in shared memory; the state stands at 2**pivot, which rarely moves."""
    even, odd, pivot, row_sum = state
    x = s * unit - pivot[None, :]
    if is_first | any_above(x, MAX_WEIGHT_LOG2, flags):
        if MASKED:
            new_pivot = gl.maximum(pivot, gl.max(s, 0) * unit - ROW_MAX_LOG2)
            old_scale = gl.exp2(pivot - new_pivot)
            x = s * unit - new_pivot[None, :]
        else:
            # From x alone: scores beside it would not fit the registers. Every row sees all keys here.
            rise = gl.max(x, 0) - ROW_MAX_LOG2
            rise = gl.where(is_first, rise, gl.maximum(rise, 0.0))
            old_scale = gl.exp2(gl.minimum(-rise, 0.0))
            new_pivot = pivot + rise
            x = x - rise[None, :]
        even = even * old_scale[None, :]
        odd = odd * old_scale[None, :]
        row_sum = rescale_row_sum(row_sum, old_scale)
        pivot = new_pivot
    p = gl.exp2(x)
    weights.permute((1, 0)).store(p.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return even, odd, pivot, row_sum + partial_row_sums(p)


@gluon.jit
def mainloop_unmasked(
    state, q_smem, weights, flags, pipeline, stage, phase, first, stop, is_first_range, scale, cap, CFG: gl.constexpr,
    scores: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop), of which every row sees all keys, into the state of the rows, which `is_first_range`
    with them or has seen a key in every row. A tile's keys are widened, and its scores asked for, while the last tile's
    values are folded in. A tile is given back when a product has taken what was read of it: a barrier says nothing of
    loads that are under way.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    zero = gl.full([CFG.BLOCK_N, state[0].shape[1]], 0.0, gl.float32, scores)
    if first < stop:
        mbarrier.wait(pipeline.k.full.index(stage), phase)
        left, right = upcast_k(pipeline.k.tiles[0].index(stage).load(operand))
        s = warpgroup_mma(left, q_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(right, q_smem.index(1).permute((1, 0)), s, is_async=True)
        s, left, right = warpgroup_mma_wait(0, deps=[s, left, right])
        release(pipeline.k.empty.index(stage), CFG)
        for tile in range(first + 1, stop):
            next_stage, next_phase = advance(stage, phase, CFG.STAGES)
            mbarrier.wait(pipeline.v.full.index(stage), phase)
            low, high = upcast_v(pipeline.v.tiles[0].index(stage).permute((1, 0)).load(operand))
            s = apply_soft_cap(s, scale, cap, CFG.CAP)
            is_first = is_first_range & (tile == first + 1)
            state = online_softmax_fp8(state, s, is_first, weights, flags, score_unit(scale, cap, CFG.CAP), False)
            even, odd, pivot, row_sum = state
            even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
            odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
            release(pipeline.v.empty.index(stage), CFG)
            mbarrier.wait(pipeline.k.full.index(next_stage), next_phase)
            left, right = upcast_k(pipeline.k.tiles[0].index(next_stage).load(operand))
            s = warpgroup_mma(left, q_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma(right, q_smem.index(1).permute((1, 0)), s, is_async=True)
            even, odd, low, high, s, left, right = warpgroup_mma_wait(0, deps=[even, odd, low, high, s, left, right])
            release(pipeline.k.empty.index(next_stage), CFG)
            state = (even, odd, pivot, row_sum)
            stage = next_stage
            phase = next_phase
        mbarrier.wait(pipeline.v.full.index(stage), phase)
        low, high = upcast_v(pipeline.v.tiles[0].index(stage).permute((1, 0)).load(operand))
        s = apply_soft_cap(s, scale, cap, CFG.CAP)
        is_first = is_first_range & (stop == first + 1)
        state = online_softmax_fp8(state, s, is_first, weights, flags, score_unit(scale, cap, CFG.CAP), False)
        even, odd, pivot, row_sum = state
        even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
        odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
        even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        release(pipeline.v.empty.index(stage), CFG)
        state = (even, odd, pivot, row_sum)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return state, stage, phase


@gluon.jit
def mainloop_fp8(
    state, q_smem, weights, flags, pipeline, stage, phase, first, stop, request_rows, scale, cap, CFG: gl.constexpr,
    MASKED: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop) into the state of the rows, one after the other; if not MASKED, the first ones of all.

    Values are read behind the weights: beside a mask there are no registers for them, and what the compiler spills for
    that, it reads back in the loop of clear tiles too.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    zero = gl.full([CFG.BLOCK_N, state[0].shape[1]], 0.0, gl.float32, scores)
    for tile in range(first, stop):
        mbarrier.wait(pipeline.k.full.index(stage), phase)
        low, high = upcast_k(pipeline.k.tiles[0].index(stage).load(operand))
        s = warpgroup_mma(low, q_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(high, q_smem.index(1).permute((1, 0)), s, is_async=True)
        s, low, high = warpgroup_mma_wait(0, deps=[s, low, high])
        release(pipeline.k.empty.index(stage), CFG)
        s = apply_soft_cap(s, scale, cap, CFG.CAP)
        if MASKED:
            s = apply_mask_transposed(s, tile, request_rows, CFG, scores)
        state = online_softmax_fp8(state, s, tile == first, weights, flags, score_unit(scale, cap, CFG.CAP), MASKED)
        mbarrier.wait(pipeline.v.full.index(stage), phase)
        low, high = upcast_v(pipeline.v.tiles[0].index(stage).permute((1, 0)).load(operand))
        even, odd, pivot, row_sum = state
        even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
        odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
        even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        release(pipeline.v.empty.index(stage), CFG)
        state = (even, odd, pivot, row_sum)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return state, stage, phase


@gluon.jit
def store_out_pairs(
    q_smem, even, odd, out, begin, packed, live, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr
):  # fmt: skip
    """The result to out, through the shared memory that q no longer needs, where even and odd d come together."""
    dtype: gl.constexpr = out.dtype.element_ty
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    low = even.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    high = odd.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16
    thread_barrier()
    reinterpret(q_smem, gl.int32, [even.shape[1], CFG.BLOCK_D // 2], plain).permute((1, 0)).store(low | high)
    thread_barrier()
    rows = reinterpret(q_smem, dtype, [even.shape[1], CFG.BLOCK_D], plain).load(row_io_layout(CFG.BLOCK_D))
    col = gl.arange(0, CFG.BLOCK_D, gl.SliceLayout(0, row_io_layout(CFG.BLOCK_D)))
    elements, there = head_columns(packed, col, group, inv_group, CFG)
    pointers = row_pointers(out, begin, packed, elements, head, group, inv_group, stride_row, stride_head, CFG)
    gl.store(pointers, rows, mask=live[:, None] & there)
