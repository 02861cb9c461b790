"""Softmax warp group of `latent_swap_ab`: scores K · Qᵀ, masks and softmax of a row tile, and the messages of p."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_compat import thread_barrier
from .latent_rs_mask import unmasked_tiles
from .latent_swap_ab_config import BUFFERS, NUM_PARTS, operand_layout, part_cells, piece_width, swapped_layout
from .latent_swap_ab_mask import TailMask, hide_unseen, locate_tile, packed_rows
from .latent_swap_ab_memory import (
    empty_barrier,
    full_barrier,
    message_empty,
    message_full,
    message_phase,
    query_empty,
    query_piece,
    scores_done,
    set_word,
    tile_of,
)
from .latent_swap_ab_queries import take_queries
from .mma_fp8_swap_ab import (
    MAX_WEIGHT_LOG2,
    ROW_MAX_LOG2,
    UNSEEN_MAX,
    any_above,
    partial_row_sums,
    rescale_row_sum,
    upcast_k,
)
from .pipeline import advance
from .softmax import apply_soft_cap, score_unit, sink_weight
from .split_kv import kv_tile_range, kv_tile_stop, request_overhead, request_rows


@gluon.jit
def load_piece(memory, stage, i: gl.constexpr, CFG: gl.constexpr):
    """Return the cells of one piece of a key tile as K; the pieces of the rest follow those of the value part."""
    WIDTH: gl.constexpr = piece_width(CFG)
    PIECES: gl.constexpr = part_cells(CFG) // WIDTH
    if i < NUM_PARTS * PIECES:  # noqa: SIM108  the rest can be absent
        tile = tile_of(memory, i // PIECES, stage, CFG)
    else:
        tile = memory.rests.index(stage)
    return tile.slice(i % PIECES * WIDTH, WIDTH, dim=1).load(operand_layout(CFG))


@gluon.jit
def query_of(memory, i: gl.constexpr, HIGH: gl.constexpr, CFG: gl.constexpr):
    """Return the operand of q that belongs to a piece (`load_piece`)."""
    VALUES: gl.constexpr = CFG.VALUE_DIM // 2 // piece_width(CFG)
    if i < VALUES:
        return query_piece(memory.queries, i, HIGH, CFG)
    else:
        return query_piece(memory.query_rests, i - VALUES, HIGH, CFG)


@gluon.jit
def compute_scores(memory, stage, phase, CFG: gl.constexpr):
    """Return row · qᵀ of a key tile, ``[BLOCK_N, BLOCK_M]`` float32, and release the tile.

    Cells are loaded and converted while the products before are in progress, as in `multiply_values`.
    """
    PIECES: gl.constexpr = part_cells(CFG) // piece_width(CFG)
    COUNT: gl.constexpr = (CFG.VALUE_DIM + CFG.REST_DIM) // 2 // piece_width(CFG)
    s = gl.full([CFG.BLOCK_N, CFG.BLOCK_M], 0.0, gl.float32, swapped_layout(CFG))
    mbarrier.wait(full_barrier(memory, 0, stage, CFG), phase)
    cells = load_piece(memory, stage, 0, CFG)
    low = s
    high = s
    for i in gl.static_range(COUNT):
        next_low, next_high = upcast_k(cells)
        if i + 1 == PIECES:
            mbarrier.wait(full_barrier(memory, 1, stage, CFG), phase)
        if i + 1 < COUNT:
            cells = load_piece(memory, stage, i + 1, CFG)
        s = warpgroup_mma(next_low, query_of(memory, i, 0, CFG).permute((1, 0)), s, use_acc=i > 0, is_async=True)
        s = warpgroup_mma(next_high, query_of(memory, i, 1, CFG).permute((1, 0)), s, is_async=True)
        if i > 0:
            s, low, high = warpgroup_mma_wait(2, deps=[s, low, high])
        low = next_low
        high = next_high
    s, low, high = warpgroup_mma_wait(0, deps=[s, low, high])
    for part in gl.static_range(NUM_PARTS):
        async_copy.mbarrier_arrive(empty_barrier(memory, part, stage, CFG), increment_count=False)
    return s


@gluon.jit
def weigh_tile(s, row_sum, memory, message, unit, CFG: gl.constexpr):
    """Update the softmax state by masked scores, and send p and the factors of the old accumulators.

    p and the accumulators are relative to 2**pivot, which rises only if p would exceed 2**MAX_WEIGHT_LOG2. Pivots stay
    in shared memory, because registers are few.
    """
    rows_at: gl.constexpr = gl.SliceLayout(0, swapped_layout(CFG))
    pivot = memory.pivots.load(rows_at)
    rises = any_above(s * unit - pivot[None, :], MAX_WEIGHT_LOG2, memory.flags)
    mbarrier.wait(message_empty(memory, message, CFG), message_phase(message) ^ 1)
    if rises:
        new_pivot = gl.maximum(pivot, gl.max(s, 0) * unit - ROW_MAX_LOG2)
        factors = gl.exp2(pivot - new_pivot)
        row_sum = rescale_row_sum(row_sum, factors)
        memory.factors.index(message % BUFFERS).store(factors)
        memory.pivots.store(new_pivot)
        pivot = new_pivot
    set_word(memory, message, rises.to(gl.int32))
    p = gl.exp2(s * unit - pivot[None, :])
    memory.weights.index(message % BUFFERS).permute((1, 0)).store(p.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(message_full(memory, message, CFG), count=1)
    return row_sum + partial_row_sums(p), message + 1


@gluon.jit
def send_count(memory, count, message, CFG: gl.constexpr):
    """Send the number of key tiles of the next request to both value warp groups (`SwapAbMemory.words`)."""
    mbarrier.wait(message_empty(memory, message, CFG), message_phase(message) ^ 1)
    set_word(memory, message, count)
    thread_barrier()
    mbarrier.arrive(message_full(memory, message, CFG), count=1)
    return message + 1


@gluon.jit
def send_places(memory, factors, places, message, CFG: gl.constexpr):
    """Send the factors of the output and the places of its rows to both value warp groups."""
    mbarrier.wait(message_empty(memory, message, CFG), message_phase(message) ^ 1)
    memory.factors.index(message % BUFFERS).store(factors)
    memory.places.index(message % BUFFERS).store(places)
    thread_barrier()
    mbarrier.arrive(message_full(memory, message, CFG), count=1)
    return message + 1


@gluon.jit
def run_softmax(args, DTYPE: gl.constexpr, CFG: gl.constexpr):
    """Compute scores and softmax of every request in this CTA's split, and send p to the value warp groups."""
    (
        k_scale, v_scale, sinks, lse, partial_lse, work, prefix_lens, q_indptr, tail_mask, tail_depth, memory, q_len,
        tail_len, group, mask_words, window_left, scale, cap, stride_out_row, stride_out_head,
    ) = args  # fmt: skip
    if CFG.SCALED & 1:
        scale = scale * gl.load(k_scale)
    tail = TailMask(
        mask=tail_mask, depth=tail_depth, words=mask_words, window_left=window_left, q_len=q_len, tail_len=tail_len
    )
    split = gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    one_row: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    VALUE_DIM: gl.constexpr = CFG.VALUE_DIM
    stage = tiles_left * 0
    phase = stage
    message = stage
    turn = stage
    number = stage
    partial_half = stage
    while tiles_left > 0:
        at = locate_tile(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
        first, end = kv_tile_range(at.prefix_len, at.tail_slots, window_left, CFG)
        if (tile < end) & (at.packed < at.rows * group):
            stop = kv_tile_stop(
                tile, tiles_left, end, at.prefix_len, at.tail_slots, at.rows, at.first_row + at.last_row_offset, CFG
            )
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            message = send_count(memory, gl.where(is_unsplit, stop - tile, tile - stop), message, CFG)
            first_unmasked, first_masked = unmasked_tiles(at, window_left, CFG)
            own_scale = take_queries(memory, at, group, turn, DTYPE, CFG) * scale
            turn ^= 1
            unit = score_unit(own_scale, cap, CFG.CAP)
            memory.pivots.store(gl.full([CFG.BLOCK_M], UNSEEN_MAX, gl.float32, one_row))
            row_sum = partial_row_sums(gl.full([CFG.BLOCK_N, CFG.BLOCK_M], 0.0, gl.float32, swapped_layout(CFG)))
            for key_tile in range(tile, stop):
                s = compute_scores(memory, stage, phase, CFG)
                if key_tile > tile:
                    async_copy.mbarrier_arrive(scores_done(memory, number, CFG), increment_count=False)
                    number += 1
                if key_tile == stop - 1:
                    async_copy.mbarrier_arrive(query_empty(memory, CFG), increment_count=False)
                s = apply_soft_cap(s, own_scale, cap, CFG.CAP)
                if (key_tile >= first_masked) | (key_tile < first_unmasked):
                    here = locate_tile(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
                    s = hide_unseen(s, key_tile, request, here, tail, group, CFG)
                row_sum, message = weigh_tile(s, row_sum, memory, message, unit, CFG)
                stage, phase = advance(stage, phase, CFG.STAGES)
            async_copy.mbarrier_arrive(scores_done(memory, number, CFG), increment_count=False)
            number += 1
            at = locate_tile(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
            first, end = kv_tile_range(at.prefix_len, at.tail_slots, window_left, CFG)
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            # One row a thread: in the layout of the scores, each thread would compute a quarter of the rows.
            pivot = memory.pivots.load(one_row)
            total = gl.convert_layout(gl.sum(gl.sum(row_sum, 0), 0), one_row)
            # If a row sees no key of this split, its sum is 0: out becomes 0 and the LSE -inf, without 0/0.
            log_sum = gl.where(total > 0, pivot + gl.log2(total), float("-inf"))
            row, head = packed_rows(at, group, one_row, CFG)
            row_live = row < at.rows
            if CFG.SINKS:
                total += sink_weight(sinks, head, row_live & is_unsplit, pivot)
            partial_row = (split * 2 + partial_half) * gl.num_programs(0) * CFG.BLOCK_M + at.packed
            partial_row += gl.arange(0, CFG.BLOCK_M, one_row)
            place = partial_row.to(gl.int64) * VALUE_DIM
            if is_unsplit:
                place = (at.begin + row).to(gl.int64) * stride_out_row + head * stride_out_head
            factors = 1.0 / gl.where(total > 0, total, 1.0)
            if CFG.SCALED & 2:
                factors = factors * gl.load(v_scale)
            message = send_places(memory, factors, gl.where(row_live, place, -1), message, CFG)
            if is_unsplit:
                if CFG.WITH_LSE:
                    gl.store(lse + (at.begin + row) * group + head, log_sum * 0.6931471805599453, mask=row_live)
            else:
                gl.store(partial_lse + partial_row, log_sum, mask=row_live)
        partial_half = partial_half * 0 + 1
        tiles_left = tiles_left - end - request_overhead(at.tail_slots, CFG) + tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)
    send_count(memory, 0, message, CFG)
