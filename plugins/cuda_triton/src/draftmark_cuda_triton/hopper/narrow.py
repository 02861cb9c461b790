"""Few rows over e4m3 KV: what wgmma takes from registers is K and V, widened there by the thread that needs them.

    K tile [keys, d]  ldmatrix  two fp16 operands [keys, d/2]      Sᵀ [keys, rows] = K · Qᵀ
    V tile [keys, d]  ldmatrix.trans  even, odd [d/2, keys]        Oᵀ [d/2, rows] += Vᵀ · Pᵀ, for even d, for odd d

Nothing wide is written to shared memory, through which `roles.widen_tiles` takes each tile three times. Two e4m3
values are one element of 16 bits to ldmatrix. Those of K are neighbours in d, over which a product sums in any order:
one instruction widens them, and the columns of q stand in that order. Those of V are neighbours in d, the operand's
rows: the bytes of two keys are sorted first.

fp16 holds e4m3 exactly, NaN too. q becomes fp16 after its row is scaled by a power of two, which loses nothing that
fp32 sums keep (what it drops is 2**-39 of the row's largest value); weights become fp16, finer than bf16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .mask import CAUSAL, TREE, visible
from .names import reinterpret, thread_barrier
from .ring import launch_dependents, make_ring
from .roles import FETCH_REGISTERS, capped, next_slot, rows_between, sink_mass
from .uniform import BLOCK, bring_uniform, clear_rows, rows_of, surplus, tile_range

UNSEEN = gl.constexpr(-1e30)
"""Exponent that a row's weights stand at before it has seen a key; finite, for -inf - -inf is NaN."""
HEADROOM = gl.constexpr(15.0)
"""A weight is 2**HEADROOM at most, the largest power of two in fp16."""
MARGIN = gl.constexpr(6.0)
"""What the largest weight seen is set to, 2**MARGIN: sums are only rescaled when a score is 2**9 times as heavy."""


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
def hide_turned(
    s, tile, first_packed, group, begin, rows, prefix_len, tail_len, tail_mask, depths, mask_words, window_left,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, TAIL: gl.constexpr, WINDOW: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """`mask.hide` of scores ``[keys, rows]``. What a row sees is worked out by threads that have one row each: those
    of the scores have a quarter of the rows, whose numbers would take the registers of every tile.
    """
    HEIGHT: gl.constexpr = s.shape[1]
    lined: gl.constexpr = gl.BlockedLayout([1, HEIGHT // 2], [HEIGHT // 4, 128 // HEIGHT], [4, 1], [1, 0])
    row = (first_packed + gl.arange(0, HEIGHT, gl.SliceLayout(1, lined))) // group
    row_live = row < rows
    slot_of_row = tail_len - rows + row
    row_position = prefix_len + slot_of_row
    if TAIL == TREE and WINDOW:
        row_position = prefix_len + gl.load(depths + slot_of_row, mask=row_live, other=0)
    words = tail_mask + (begin + row).to(gl.int64) * mask_words
    seen = visible(
        tile, prefix_len, tail_len, slot_of_row, row_position, row_live, words, depths, mask_words, window_left,
        BLOCK_N, BOX, TAIL, WINDOW, lined,
    )  # fmt: skip
    seen = gl.convert_layout(gl.permute(seen.to(gl.int8), (1, 0)), scores) != 0
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def bring_queries(own, q, begin, packed, live, head, group, stride_row, stride_head, HEAD_DIM: gl.constexpr,
                  BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """Packed rows of q as two fp16 operands of the order of `widened_keys`; what scores are to be multiplied by."""
    col = gl.arange(0, BLOCK_D // 2, gl.SliceLayout(0, moving))
    col = col // 2 * 4 + col % 2
    at = (begin + packed // group).to(gl.int64) * stride_row + (head * group + packed % group) * stride_head
    pointers = q + at[:, None] + col[None, :]
    low = gl.load(pointers, mask=live[:, None] & (col < HEAD_DIM)[None, :], other=0.0).to(gl.float32)
    high = gl.load(pointers + 2, mask=live[:, None] & (col + 2 < HEAD_DIM)[None, :], other=0.0).to(gl.float32)
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
def weigh_narrow(state, s, is_first, weights, flags, scale, MASKED: gl.constexpr, CAP: gl.constexpr):
    """Scores to weights in shared memory; the state stands at 2**pivot, which rarely moves."""
    even, odd, pivot, mass = state
    unit = scale
    if CAP:
        unit = 1.4426950408889634
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
    state, own, weights, flags, ring, slot, phase, first, stop, scale, cap,
    BLOCK_N: gl.constexpr, CAP: gl.constexpr, STAGES: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop), of which every row sees all keys, into the state of the rows. A tile's keys are
    widened, and its scores asked for, while the last tile's values are folded in.
    """
    k_ring, v_ring, k_full, v_full, empty = ring
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    zero = gl.full([BLOCK_N, state[0].shape[1]], 0.0, gl.float32, scores)
    if first < stop:
        mbarrier.wait(k_full.index(slot), phase)
        left, right = widened_keys(k_ring.index(slot).load(operand))
        s = warpgroup_mma(left, own.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(right, own.index(1).permute((1, 0)), s, is_async=True)
        s, left, right = warpgroup_mma_wait(0, deps=[s, left, right])
        for tile in range(first + 1, stop):
            next, next_phase = next_slot(slot, phase, STAGES)
            mbarrier.wait(v_full.index(slot), phase)
            low, high = widened_values(v_ring.index(slot).permute((1, 0)).load(operand))
            state = weigh_narrow(state, capped(s, scale, cap, CAP), tile == first + 1, weights, flags, scale, False, CAP)
            even, odd, pivot, mass = state
            even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
            odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.wait(k_full.index(next), next_phase)
            left, right = widened_keys(k_ring.index(next).load(operand))
            s = warpgroup_mma(left, own.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma(right, own.index(1).permute((1, 0)), s, is_async=True)
            even, odd, low, high, s, left, right = warpgroup_mma_wait(0, deps=[even, odd, low, high, s, left, right])
            state = (even, odd, pivot, mass)
            slot = next
            phase = next_phase
        mbarrier.wait(v_full.index(slot), phase)
        low, high = widened_values(v_ring.index(slot).permute((1, 0)).load(operand))
        state = weigh_narrow(state, capped(s, scale, cap, CAP), stop == first + 1, weights, flags, scale, False, CAP)
        even, odd, pivot, mass = state
        even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
        odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
        even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        mbarrier.arrive(empty.index(slot), count=1)
        state = (even, odd, pivot, mass)
        slot, phase = next_slot(slot, phase, STAGES)
    return state, slot, phase


@gluon.jit
def fold_narrow_tiles(
    state, own, weights, flags, ring, slot, phase, first, stop, first_packed, group, begin, rows, prefix_len, tail_len,
    tail_mask, depths, mask_words, window_left, scale, cap,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, MASKED: gl.constexpr, TAIL: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr, STAGES: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop) into the state of the rows, one after the other."""
    k_ring, v_ring, k_full, v_full, empty = ring
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    zero = gl.full([BLOCK_N, state[0].shape[1]], 0.0, gl.float32, scores)
    for tile in range(first, stop):
        mbarrier.wait(k_full.index(slot), phase)
        low, high = widened_keys(k_ring.index(slot).load(operand))
        s = warpgroup_mma(low, own.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(high, own.index(1).permute((1, 0)), s, is_async=True)
        s, low, high = warpgroup_mma_wait(0, deps=[s, low, high])
        s = capped(s, scale, cap, CAP)
        if MASKED:
            s = hide_turned(
                s, tile, first_packed, group, begin, rows, prefix_len, tail_len, tail_mask, depths, mask_words,
                window_left, BLOCK_N, BOX, TAIL, WINDOW, scores,
            )  # fmt: skip
        mbarrier.wait(v_full.index(slot), phase)
        low, high = widened_values(v_ring.index(slot).permute((1, 0)).load(operand))
        state = weigh_narrow(state, s, tile == first, weights, flags, scale, MASKED, CAP)
        even, odd, pivot, mass = state
        even = warpgroup_mma(low, weights.permute((1, 0)), even, is_async=True)
        odd = warpgroup_mma(high, weights.permute((1, 0)), odd, is_async=True)
        even, odd, low, high = warpgroup_mma_wait(0, deps=[even, odd, low, high])
        mbarrier.arrive(empty.index(slot), count=1)
        state = (even, odd, pivot, mass)
        slot, phase = next_slot(slot, phase, STAGES)
    return state, slot, phase


@gluon.jit
def store_pairs(own, even, odd, out, begin, packed, live, head, group, stride_row, stride_head,
                HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """The result to out, through the shared memory that q no longer needs, where even and odd d come together."""
    dtype: gl.constexpr = out.dtype.element_ty
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    low = even.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    high = odd.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16
    thread_barrier()
    reinterpret(own, gl.int32, [even.shape[1], BLOCK_D // 2], plain).permute((1, 0)).store(low | high)
    thread_barrier()
    rows = reinterpret(own, dtype, [even.shape[1], BLOCK_D], plain).load(moving)
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, moving))
    pointers = rows_between(out, begin, packed, head, group, stride_row, stride_head, BLOCK_D, moving)
    gl.store(pointers, rows, mask=live[:, None] & (col < HEAD_DIM)[None, :])


@gluon.jit
def fold_narrow(
    q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask, tail_depth,
    own, weights, flags, ring, q_len, tail_len, group, mask_words, window_left, scale, cap,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, TAIL: gl.constexpr,
    RAGGED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr,
    WITH_LSE: gl.constexpr, ITEM_COST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The program's packed rows, for every request of a piece; see `uniform.fold_uniform`."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    asked: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    moving: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    rows_at: gl.constexpr = gl.SliceLayout(0, scores)
    m, head, number = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    num_kv_heads, row_tiles = gl.num_programs(1), gl.num_programs(0)
    request = gl.load(work + number * 4)
    tile = gl.load(work + number * 4 + 1)
    left = gl.load(work + number * 4 + 2)
    packed = m * BLOCK_M + gl.arange(0, BLOCK_M, rows_at)
    asking = m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, asked))
    moved = m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, moving))
    k_factor = 1.0
    v_factor = 1.0
    if SCALED & 1:
        k_factor = gl.load(k_scale)
    if SCALED & 2:
        v_factor = gl.load(v_scale)
    slot = left * 0
    phase = left * 0
    half = left * 0
    while left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, slots = rows_of(q_indptr, request, q_len, tail_len, RAGGED)
        first, end = tile_range(prefix_len, slots, window_left, BLOCK_N, WINDOW, RAGGED)
        if (tile < end) & (m * BLOCK_M < rows * group):
            stop = gl.minimum(tile + left, end)
            seen_by_all = prefix_len
            if TAIL == CAUSAL:
                seen_by_all = prefix_len + slots - rows + m * BLOCK_M // group + 1
            # A tile with room behind the last key is masked whatever its rows see.
            clear = gl.minimum(seen_by_all, prefix_len + slots) // BLOCK_N
            if TAIL == BLOCK:
                clear = (prefix_len + slots) // BLOCK_N
            if WINDOW:
                clear = tile
            row = packed // group
            row_live = row < rows
            size = bring_queries(
                own, q, begin, asking, asking < rows * group, head, group, stride_q_row, stride_q_head, HEAD_DIM,
                BLOCK_D, asked,
            )  # fmt: skip
            depths = tail_depth + (begin if RAGGED else request * tail_len)
            even = gl.full([BLOCK_D // 2, BLOCK_M], 0.0, gl.float32, scores)
            odd = gl.full([BLOCK_D // 2, BLOCK_M], 0.0, gl.float32, scores)
            mass = parts(gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, scores))
            unit = size * (scale * k_factor)
            between = gl.minimum(gl.maximum(clear, tile), stop)
            start = gl.where(between > tile, 0.0, UNSEEN)
            pivot = gl.full([BLOCK_M], 0.0, gl.float32, rows_at) + start
            state = (even, odd, pivot, mass)
            if BLOCK_D > 128 and not WINDOW:
                state, slot, phase = fold_narrow_tiles(
                    state, own, weights, flags, ring, slot, phase, tile, between, m * BLOCK_M, group, begin, rows,
                    prefix_len, slots, tail_mask, depths, mask_words, window_left, unit, cap, BLOCK_N, BOX, False, TAIL,
                    WINDOW, CAP, STAGES, scores,
                )  # fmt: skip
            elif not WINDOW:
                state, slot, phase = fold_clear_tiles(
                    state, own, weights, flags, ring, slot, phase, tile, between, unit, cap, BLOCK_N, CAP, STAGES, scores
                )
            state, slot, phase = fold_narrow_tiles(
                state, own, weights, flags, ring, slot, phase, between, stop, m * BLOCK_M, group, begin, rows,
                prefix_len, slots, tail_mask, depths, mask_words, window_left, unit, cap, BLOCK_N, BOX, True, TAIL,
                WINDOW, CAP, STAGES, scores,
            )  # fmt: skip
            even, odd, pivot, mass = state
            # A piece in which a row sees nothing weighs nothing: out 0, lse -inf, never 0/0.
            total = gl.convert_layout(gl.sum(gl.sum(mass, 0), 0), rows_at)
            log_mass = gl.where(total > 0, pivot + gl.log2(total), float("-inf"))
            whole = (tile == first) & (stop == end)
            if SINKS:
                total += sink_mass(sinks, head * group + packed % group, row_live & whole, pivot)
            share = (v_factor / gl.where(total > 0, total, 1.0))[None, :]
            even = even * share
            odd = odd * share
            if whole:
                store_pairs(
                    own, even, odd, out, begin, moved, moved < rows * group, head, group, stride_out_row,
                    stride_out_head, HEAD_DIM, BLOCK_D, moving,
                )  # fmt: skip
                if WITH_LSE:
                    cell = (begin + row) * (num_kv_heads * group) + head * group + packed % group
                    gl.store(lse + cell, log_mass * 0.6931471805599453, mask=row_live)
            else:
                block = ((number * 2 + half) * num_kv_heads + head) * row_tiles * BLOCK_M
                gl.store(partial_lse + block + packed, log_mass, mask=row_live)
                col = 2 * gl.arange(0, BLOCK_D // 2, gl.SliceLayout(1, scores))
                cells = partial_out + (block + packed).to(gl.int64)[None, :] * HEAD_DIM + col[:, None]
                there = row_live[None, :] & (col < HEAD_DIM)[:, None]
                gl.store(cells, even, mask=there)
                gl.store(cells + 1, odd, mask=there)
        half = half * 0 + 1
        left -= end + surplus(slots, ITEM_COST, RAGGED) - tile
        request += 1
        if left > 0:
            _, _, slots = rows_of(q_indptr, request, q_len, tail_len, RAGGED)
            tile, end = tile_range(gl.load(prefix_lens + request), slots, window_left, BLOCK_N, WINDOW, RAGGED)


@gluon.jit(
    do_not_specialize=[
        "q_len",
        "tail_len",
        "num_reqs",
        "num_rows",
        "group",
        "mask_words",
        "window_left",
        "stride_table",
        "num_pages",
    ]
)
def attend_narrow(
    q, k_source, v_source, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr,
    page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words, window_left, scale, cap,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, TAIL: gl.constexpr, RAGGED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr, ITEM_COST: gl.constexpr, PDL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As `uniform.attend_uniform`, over e4m3 ``[pages, P, heads, dim]``; BLOCK_M: 8 to 64 packed rows a program."""
    if PDL:
        launch_dependents()
    moving: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D // 2], gl.float16)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], gl.float16)
    own = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, BLOCK_D // 2], rows)
    weights = gl.allocate_shared_memory(gl.float16, [BLOCK_M, BLOCK_N], keys)
    flags = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = make_ring(gl.int16, 1, BLOCK_N, BLOCK_D // 2, STAGES)
    if RAGGED and gl.program_id(0) == 0:
        clear_rows(out, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, HEAD_DIM, BLOCK_D,
                   moving)  # fmt: skip
    gl.warp_specialize(
        [
            (fold_narrow, (
                q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
                tail_depth, own, weights, flags, ring, q_len, tail_len, group, mask_words, window_left, scale, cap,
                stride_q_row, stride_q_head, stride_out_row, stride_out_head, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D,
                TAIL, RAGGED, WINDOW, CAP, SCALED, SINKS, WITH_LSE, ITEM_COST, STAGES,
            )),
            (bring_uniform, (
                work, prefix_lens, q_indptr, page_table, k_source, v_source, ring, ring, q_len, tail_len, group,
                window_left, stride_table, num_pages, False, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, RAGGED,
                ITEM_COST, STAGES, STAGES,
            )),
        ],
        [1], [FETCH_REGISTERS],
    )  # fmt: skip
