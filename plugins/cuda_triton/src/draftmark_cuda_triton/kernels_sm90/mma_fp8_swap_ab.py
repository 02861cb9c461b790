"""Mainloop over e4m3 with operands A and B swapped: K and V are upcast in registers and are wgmma's A operand.

    K tile [keys, d]  ldmatrix  two fp16 operands [keys, d/2]      Sᵀ [keys, rows] = K · Qᵀ
    V tile [keys, d]  ldmatrix.trans  even, odd [d/2, keys]        Oᵀ [d/2, rows] += Vᵀ · Pᵀ, for even d, for odd d

No upcast tile is written to shared memory, unlike in `producer_upcast.upcast_tiles`. ldmatrix reads two e4m3 values as
one 16-bit element. In K, the two values are adjacent in d. The product sums over d, so the order of d is free: one
instruction converts both values, and the columns of q are stored in the same order. In V the two values are adjacent in
d too, but d is the row dimension of this operand. So the bytes of two keys are reordered before the conversion.

fp16 represents e4m3 exactly, including NaN. q is scaled by one power of two and rounded to fp16. The rounding error is
2**-39 of its largest element, less than the error of fp32 sums. Weights (P, the softmax probabilities) are rounded to
fp16, which is finer than bf16.
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
"""Pivot of a row that has seen no key; finite, because -inf - -inf is NaN."""
MAX_WEIGHT_LOG2 = gl.constexpr(15.0)
"""Base-2 logarithm of the largest weight, the largest power of two in fp16."""
ROW_MAX_LOG2 = gl.constexpr(6.0)
"""Base-2 logarithm of a row's largest weight after rescaling. A key more than 2**9 times heavier rescales again."""


class RequestRows(NamedTuple):
    """Visibility of one request's keys, for requests that fit one row tile; int32 unless noted.

    Attributes:
        group, inv_group: query heads of a KV head, and its reciprocal (`pack_gqa.split_packed_row`).
        begin, rows: the request's first row in q, and its number of rows.
        prefix_len, tail_len: numbers of keys in the prefix, and in the tail (the request's new tokens).
        tail_mask, mask_words: trees only: pointer to the packed masks of all rows, and int32 words of a row's mask.
        depths: trees only: pointer to the depths of the tail's tokens.
        window_left: tokens before its own position that a row sees.
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
    """Convert K, int16 ``[keys, d/2]`` with two e4m3 values each, to two fp16 operands ``[keys, d/2]``.

    Columns 2c and 2c+1 of the first operand are d = 4c and 4c+1; of the second, d = 4c+2 and 4c+3.
    """
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
    """Convert V, int16 ``[d/2, keys]`` with two e4m3 values each, to two fp16 operands: even d and odd d."""
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
    """Set scores ``[keys, rows]`` to -inf where a row does not see the key, as `mask.visible_keys` defines.

    Visibility is computed in a register layout with one row a thread. In the layout of the scores each thread holds a
    quarter of the rows, and the indices of these rows would occupy registers in every tile.
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
    """Store packed rows of q to shared memory as two fp16 operands; return the factor for their scores.

    The order of the columns is that of `upcast_k`.
    """
    col = gl.arange(0, CFG.BLOCK_D // 2, gl.SliceLayout(0, layout))
    col = col // 2 * 4 + col % 2
    # Four columns that start at a multiple of four all belong to one head, or all are padding. So one index serves all
    # four.
    elements, there = head_columns(packed, col, group, inv_group, CFG)
    pointers = row_pointers(q, begin, packed, elements, head, group, inv_group, stride_row, stride_head, CFG)
    low = gl.load(pointers, mask=live[:, None] & there, other=0.0).to(gl.float32)
    high = gl.load(pointers + 2, mask=live[:, None] & there, other=0.0).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
    # Infinities do not count: a row with an infinity keeps it, but must not change the scale of the other rows.
    largest = gl.max(gl.where(largest < float("inf"), largest, 0.0), 0)
    # Scale so that the largest value's exponent becomes 14, one less than the largest exponent of fp16.
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
    """Add the two weights p of each row and 16 keys in a thread: ``[keys / 16, 8, rows]``, half the registers."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def rescale_row_sum(row_sum, old_scale):
    """Multiply `partial_row_sums` by a factor for each row."""
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, row_sum.type.layout))
    return row_sum * gl.convert_layout(old_scale, rows)[None, None, :]


@gluon.jit
def any_above(x, limit, flags):
    """Return True in every thread if any element of ``[keys, rows]`` exceeds `limit`.

    Each thread compares its own elements, each warp reduces the results in one instruction, and all threads read the
    flags of the four warps from shared memory.
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
    """Write a tile's weights (p, softmax probabilities) to shared memory; update the state (even, odd, pivot, row_sum).

    Weights and accumulators (even and odd d) are relative to 2**pivot. The pivot rises only if a weight would exceed
    2**MAX_WEIGHT_LOG2.
    """
    even, odd, pivot, row_sum = state
    x = s * unit - pivot[None, :]
    if is_first | any_above(x, MAX_WEIGHT_LOG2, flags):
        if MASKED:
            new_pivot = gl.maximum(pivot, gl.max(s, 0) * unit - ROW_MAX_LOG2)
            old_scale = gl.exp2(pivot - new_pivot)
            x = s * unit - new_pivot[None, :]
        else:
            # The rise is computed from x only, because keeping the scores too would exceed the registers. This is
            # correct since every row sees all keys here.
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
    """Process key tiles [first, stop) in which every row sees all keys; return the state, the stage and the phase.

    The upcast of a tile's keys and its q·k product overlap p·v of the previous tile. A stage is released only after the
    product that takes its registers is issued, because an mbarrier arrival does not wait for outstanding loads.

    Args:
        is_first_range: True if `first` is the first tile of the rows in this split; otherwise every row has seen a key.
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
    """Process key tiles [first, stop) without overlap; without MASKED, `first` is the rows' first tile in the split.

    V is read after the weights are computed. An earlier read would exceed the registers if a mask is applied, and the
    compiler would reload the spilled registers in the loop of unmasked tiles too.
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
    """Store the output; even and odd d, from separate accumulators, are interleaved in q's shared memory."""
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
