"""e4m3 tiles folded into few rows: what wgmma takes from registers is K and V, widened by the thread that has them.

    K tile [keys, d]  ldmatrix  two fp16 operands [keys, d/2]      Sᵀ [keys, rows] = K · Qᵀ
    V tile [keys, d]  ldmatrix.trans  even, odd [d/2, keys]        Oᵀ [d/2, rows] += Vᵀ · Pᵀ, for even d, for odd d

Nothing wide is written to shared memory, through which `fetch.widen_tiles` takes each tile three times. Two e4m3
values are one element of 16 bits to ldmatrix. Those of K are neighbours in d, over which a product sums in any order:
one instruction widens them, and the columns of q stand in that order. Those of V are neighbours in d, the operand's
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

from .constants import moving_of
from .mask import TREE, visible
from .names import reinterpret, thread_barrier
from .ring import leave, next_slot
from .rows import apart, columns_of, rows_between
from .softmax import capped, unit_of

UNSEEN = gl.constexpr(-1e30)
"""Exponent that a row's weights stand at before it has seen a key; finite, for -inf - -inf is NaN."""
HEADROOM = gl.constexpr(15.0)
"""A weight is 2**HEADROOM at most, the largest power of two in fp16."""
MARGIN = gl.constexpr(6.0)
"""Where the heaviest key seen stands, 2**MARGIN: sums are rescaled when one comes that is 2**9 times as heavy."""


class RowTile(NamedTuple):
    """Of a request whose rows are one row tile, what says which keys each row sees, int32 where nothing is said.

    Attributes:
        group, inverse: query heads of a KV head, as `rows.apart` takes them.
        begin, rows: the request's first row, and how many it has.
        prefix_len, tail_len: its keys before the tail, and in it.
        tail_mask, mask_words: of a tree, pointer to the mask of all rows, and words of each.
        depths: of a tree, pointer to the depths of the tail's slots.
        window_left: tokens left of its own that a row sees.
    """

    group: gl.tensor
    inverse: gl.tensor
    begin: gl.tensor
    rows: gl.tensor
    prefix_len: gl.tensor
    tail_len: gl.tensor
    tail_mask: gl.tensor
    depths: gl.tensor
    mask_words: gl.tensor
    window_left: gl.tensor


@gluon.jit
def widened_keys(x):
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
def widened_values(x):
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
def hide_turned(s, tile, row_tile, C: gl.constexpr, scores: gl.constexpr):
    """`mask.hide` of scores ``[keys, rows]``. What a row sees is worked out by threads that have one row each: those
    of the scores have a quarter of the rows, whose numbers would take the registers of every tile.
    """
    HEIGHT: gl.constexpr = s.shape[1]
    lined: gl.constexpr = gl.BlockedLayout([1, HEIGHT // 2], [HEIGHT // 4, 128 // HEIGHT], [4, 1], [1, 0])
    row, _ = apart(gl.arange(0, HEIGHT, gl.SliceLayout(1, lined)), row_tile.group, row_tile.inverse)
    row_live = row < row_tile.rows
    slot_of_row = row_tile.tail_len - row_tile.rows + row
    row_position = row_tile.prefix_len + slot_of_row
    if C.TAIL == TREE and C.WINDOW:
        row_position = row_tile.prefix_len + gl.load(row_tile.depths + slot_of_row, mask=row_live, other=0)
    words = row_tile.tail_mask + (row_tile.begin + row).to(gl.int64) * row_tile.mask_words
    seen = visible(
        tile, row_tile.prefix_len, row_tile.tail_len, slot_of_row, row_position, row_live, words, row_tile.depths,
        row_tile.mask_words, row_tile.window_left, C, lined,
    )  # fmt: skip
    seen = gl.convert_layout(gl.permute(seen.to(gl.int8), (1, 0)), scores) != 0
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def bring_queries(
    own, q, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr, moving: gl.constexpr
):  # fmt: skip
    """Packed rows of q as two fp16 operands of the order of `widened_keys`; what scores are to be multiplied by."""
    col = gl.arange(0, C.BLOCK_D // 2, gl.SliceLayout(0, moving))
    col = col // 2 * 4 + col % 2
    # Four that begin at a multiple of four are all of one head, or all of none.
    elements, there = columns_of(packed, col, group, inverse, C)
    pointers = rows_between(q, begin, packed, elements, head, group, inverse, stride_row, stride_head, C)
    low = gl.load(pointers, mask=live[:, None] & there, other=0.0).to(gl.float32)
    high = gl.load(pointers + 2, mask=live[:, None] & there, other=0.0).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
    # An infinite row stays infinite, and leaves the others as they are.
    largest = gl.max(gl.where(largest < float("inf"), largest, 0.0), 0)
    # The power of two of the largest value becomes 2**14.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    thread_barrier()
    own.index(0).store((low * factor).to(gl.float16))
    own.index(1).store((high * factor).to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def parts(p):
    """Sums of two weights ``[keys / 16, 8, rows]``, which one thread has: half the registers, nothing exchanged."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def shrunk(mass, shrink):
    """`parts` times a factor for each row."""
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mass.type.layout))
    return mass * gl.convert_layout(shrink, rows)[None, None, :]


@gluon.jit
def any_above(x, most, flags):
    """Whether any of ``[keys, rows]`` is above `most`: a thread looks at its own, one instruction a warp asks its
    threads, and every thread reads what the four warps have found.
    """
    HEIGHT: gl.constexpr = x.shape[1]
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    own = gl.reshape(x, [4, 2, 8, HEIGHT // 8, 4, 2])
    own = gl.max(gl.max(gl.max(own, 5), 3), 1)
    flags.store(gl.max(gl.reshape((own > most).to(gl.int32), [4, 32]), 1))
    thread_barrier()
    return gl.max(flags.load(everywhere), 0) != 0


@gluon.jit
def weigh_narrow(state, s, is_first, weights, flags, unit, MASKED: gl.constexpr):
    """Scores to weights in shared memory; the state stands at 2**pivot, which rarely moves."""
    even, odd, pivot, mass = state
    x = s * unit - pivot[None, :]
    if is_first | any_above(x, HEADROOM, flags):
        if MASKED:
            raised = gl.maximum(pivot, gl.max(s, 0) * unit - MARGIN)
            shrink = gl.exp2(pivot - raised)
            x = s * unit - raised[None, :]
        else:
            # From x alone: scores beside it would not fit the registers. Every row sees all keys here.
            rise = gl.max(x, 0) - MARGIN
            rise = gl.where(is_first, rise, gl.maximum(rise, 0.0))
            shrink = gl.exp2(gl.minimum(-rise, 0.0))
            raised = pivot + rise
            x = x - rise[None, :]
        even = even * shrink[None, :]
        odd = odd * shrink[None, :]
        mass = shrunk(mass, shrink)
        pivot = raised
    p = gl.exp2(x)
    weights.permute((1, 0)).store(p.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return even, odd, pivot, mass + parts(p)


@gluon.jit
def fold_clear_tiles(
    state, own, weights, flags, ring, slot, phase, first, stop, begins, scale, cap, C: gl.constexpr,
    scores: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop), of which every row sees all keys, into the state of the rows, which `begins` with them
    or has seen a key in every row. A tile's keys are widened, and its scores asked for, while the last tile's values
    are folded in. A tile is given back when a product has taken what was read of it: a barrier says nothing of loads
    that are under way.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    zero = gl.full([C.BLOCK_N, state[0].shape[1]], 0.0, gl.float32, scores)
    if first < stop:
        mbarrier.wait(ring.k.full.index(slot), phase)
        left, right = widened_keys(ring.k.tiles[0].index(slot).load(operand))
        s = warpgroup_mma(left, own.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(right, own.index(1).permute((1, 0)), s, is_async=True)
        s, left, right = warpgroup_mma_wait(0, deps=[s, left, right])
        leave(ring.k.free.index(slot), C)
        for tile in range(first + 1, stop):
            next, next_phase = next_slot(slot, phase, C.STAGES)
            mbarrier.wait(ring.v.full.index(slot), phase)
            low, high = widened_values(ring.v.tiles[0].index(slot).permute((1, 0)).load(operand))
            s = capped(s, scale, cap, C.CAP)
            is_first = begins & (tile == first + 1)
            state = weigh_narrow(state, s, is_first, weights, flags, unit_of(scale, cap, C.CAP), False)
            even, odd, pivot, mass = state
            even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
            odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
            leave(ring.v.free.index(slot), C)
            mbarrier.wait(ring.k.full.index(next), next_phase)
            left, right = widened_keys(ring.k.tiles[0].index(next).load(operand))
            s = warpgroup_mma(left, own.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma(right, own.index(1).permute((1, 0)), s, is_async=True)
            even, odd, low, high, s, left, right = warpgroup_mma_wait(0, deps=[even, odd, low, high, s, left, right])
            leave(ring.k.free.index(next), C)
            state = (even, odd, pivot, mass)
            slot = next
            phase = next_phase
        mbarrier.wait(ring.v.full.index(slot), phase)
        low, high = widened_values(ring.v.tiles[0].index(slot).permute((1, 0)).load(operand))
        s = capped(s, scale, cap, C.CAP)
        is_first = begins & (stop == first + 1)
        state = weigh_narrow(state, s, is_first, weights, flags, unit_of(scale, cap, C.CAP), False)
        even, odd, pivot, mass = state
        even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
        odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
        even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        leave(ring.v.free.index(slot), C)
        state = (even, odd, pivot, mass)
        slot, phase = next_slot(slot, phase, C.STAGES)
    return state, slot, phase


@gluon.jit
def fold_narrow_tiles(
    state, own, weights, flags, ring, slot, phase, first, stop, row_tile, scale, cap, C: gl.constexpr,
    MASKED: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop) into the state of the rows, one after the other; if not MASKED, the first ones of all.

    Values are read behind the weights: beside a mask there are no registers for them, and what the compiler spills for
    that, it reads back in the loop of clear tiles too.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    zero = gl.full([C.BLOCK_N, state[0].shape[1]], 0.0, gl.float32, scores)
    for tile in range(first, stop):
        mbarrier.wait(ring.k.full.index(slot), phase)
        low, high = widened_keys(ring.k.tiles[0].index(slot).load(operand))
        s = warpgroup_mma(low, own.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(high, own.index(1).permute((1, 0)), s, is_async=True)
        s, low, high = warpgroup_mma_wait(0, deps=[s, low, high])
        leave(ring.k.free.index(slot), C)
        s = capped(s, scale, cap, C.CAP)
        if MASKED:
            s = hide_turned(s, tile, row_tile, C, scores)
        state = weigh_narrow(state, s, tile == first, weights, flags, unit_of(scale, cap, C.CAP), MASKED)
        mbarrier.wait(ring.v.full.index(slot), phase)
        low, high = widened_values(ring.v.tiles[0].index(slot).permute((1, 0)).load(operand))
        even, odd, pivot, mass = state
        even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
        odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
        even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        leave(ring.v.free.index(slot), C)
        state = (even, odd, pivot, mass)
        slot, phase = next_slot(slot, phase, C.STAGES)
    return state, slot, phase


@gluon.jit
def store_pairs(
    own, even, odd, out, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr
):  # fmt: skip
    """The result to out, through the shared memory that q no longer needs, where even and odd d come together."""
    dtype: gl.constexpr = out.dtype.element_ty
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    low = even.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    high = odd.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16
    thread_barrier()
    reinterpret(own, gl.int32, [even.shape[1], C.BLOCK_D // 2], plain).permute((1, 0)).store(low | high)
    thread_barrier()
    rows = reinterpret(own, dtype, [even.shape[1], C.BLOCK_D], plain).load(moving_of(C.BLOCK_D))
    col = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, moving_of(C.BLOCK_D)))
    elements, there = columns_of(packed, col, group, inverse, C)
    pointers = rows_between(out, begin, packed, elements, head, group, inverse, stride_row, stride_head, C)
    gl.store(pointers, rows, mask=live[:, None] & there)
