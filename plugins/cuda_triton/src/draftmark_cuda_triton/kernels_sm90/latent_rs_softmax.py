"""Softmax warp group of `latent_rs`: scores, masks and softmax of a row tile, and the messages of p."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .config import scores_layout
from .gluon_compat import thread_barrier
from .latent_config import chunk_width
from .latent_rs_config import (
    in_registers,
    num_pieces,
    piece_column,
    piece_width,
    query_layout,
    rest_in_registers,
    waits_for_scores,
)
from .latent_rs_mask import (
    everything_seen,
    locate_rows,
    own_rows,
    row_mask_of,
    unmasked_tiles,
)
from .latent_rs_memory import (
    advance_both,
    count_of,
    empty_barrier,
    full_barrier,
    message_empty,
    message_full,
    places_of,
    query_barrier,
    query_part,
    scores_done,
    tile_of,
)
from .mask import TREE, hide_by_depth, hide_unseen, seen_keys
from .softmax import apply_soft_cap, online_softmax, partial_row_sums, reduce_row_sum, score_unit, sink_weight
from .split_kv import kv_tile_range, kv_tile_stop, request_overhead, request_rows

NO_ROW = gl.constexpr(1e30)
"""Maximum of a packed row that belongs to another request: no score exceeds it, and all its weights are 0."""


@gluon.jit
def piece_of(memory, half: gl.constexpr, i: gl.constexpr, stage, CFG: gl.constexpr, QUERIES: gl.constexpr = False):
    """Return the columns of a stage that belong to a piece of q (`latent_rs_config.query_pieces`).

    Args:
        QUERIES: the stage holds rows of q.
    """
    column: gl.constexpr = piece_column(CFG, half, i)
    chunk = tile_of(memory, half, column // chunk_width(CFG), stage, CFG)
    if QUERIES:
        chunk = query_part(chunk, CFG)
    if piece_width(CFG, half, i) == chunk_width(CFG):
        return chunk
    else:
        return chunk.slice(column % chunk_width(CFG), piece_width(CFG, half, i), dim=1)


@gluon.jit
def take_queries(memory, state, CFG: gl.constexpr):
    """Take 64 rows of q out of a pipeline stage: pieces of the value part to registers, the others to shared memory.

    Returns:
        queries: one tensor or shared memory ``[64, columns]`` for each piece of both halves, then the rest if it is in
            registers.
    """
    stage, phase, rest_stage, rest_phase = state
    queries = ()
    stored = ()
    for half in gl.static_range(2):
        mbarrier.wait(full_barrier(memory, half, stage, CFG), phase)
        for i in gl.static_range(num_pieces(CFG, half)):
            rows = piece_of(memory, half, i, stage, CFG, QUERIES=True).load(query_layout(CFG))
            if in_registers(CFG, half, i):
                queries = queries + (rows,)  # type: ignore[assignment]  # noqa: RUF005
            else:
                memory.queries[len(stored)].store(rows)
                queries = queries + (memory.queries[len(stored)],)  # type: ignore[assignment]  # noqa: RUF005
                stored = stored + (0,)  # type: ignore[assignment]  # noqa: RUF005
        async_copy.mbarrier_arrive(empty_barrier(memory, half, stage, CFG), increment_count=False)
    if CFG.REST_DIM > 0:
        mbarrier.wait(full_barrier(memory, 2, rest_stage, CFG), rest_phase)
        rows = query_part(memory.rests.index(rest_stage), CFG).load(query_layout(CFG))
        async_copy.mbarrier_arrive(empty_barrier(memory, 2, rest_stage, CFG), increment_count=False)
        if rest_in_registers(CFG):
            queries = queries + (rows,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            memory.rests.index(CFG.REST_STAGES).store(rows)
    if (CFG.REST_DIM > 0 and not rest_in_registers(CFG)) or len(stored) > 0:
        fence_async_shared()
        thread_barrier()
    return queries


@gluon.jit
def compute_scores(queries, memory, state, CFG: gl.constexpr):
    """Return q·rowᵀ of a key tile, ``[64, BLOCK_N]`` float32, and release its rest.

    A product starts as soon as its own part is loaded.
    """
    stage, phase, rest_stage, rest_phase = state
    s = gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG))
    for half in gl.static_range(2):
        mbarrier.wait(full_barrier(memory, half, stage, CFG), phase)
        for i in gl.static_range(num_pieces(CFG, half)):
            s = warpgroup_mma(
                queries[half * num_pieces(CFG, 0) + i], piece_of(memory, half, i, stage, CFG).permute((1, 0)), s,
                use_acc=half + i > 0, is_async=True,
            )  # fmt: skip
    if CFG.REST_DIM > 0:
        mbarrier.wait(full_barrier(memory, 2, rest_stage, CFG), rest_phase)
        rest = memory.rests.index(rest_stage)
        if rest_in_registers(CFG):
            s = warpgroup_mma(queries[len(queries) - 1], rest.permute((1, 0)), s, is_async=True)
        else:
            s = warpgroup_mma(memory.rests.index(CFG.REST_STAGES), rest.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if CFG.REST_DIM > 0:
        async_copy.mbarrier_arrive(empty_barrier(memory, 2, rest_stage, CFG), increment_count=False)
    return s


@gluon.jit
def weigh_tile(s, row_max, row_sum, memory, message, scale, cap, CFG: gl.constexpr):
    """Update the softmax state by masked scores, and send p and the factors of the old accumulators."""
    p, old_scale, row_max, row_sum, max_moved = online_softmax(s, score_unit(scale, cap, CFG.CAP), row_max, row_sum)
    mbarrier.wait(message_empty(memory, CFG), message ^ 1)
    memory.weights.store(p.to(memory.weights.dtype))
    memory.factors.store(old_scale)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(message_full(memory, CFG), count=1)
    return row_max, row_sum, message ^ 1


@gluon.jit
def send_count(memory, count, message, CFG: gl.constexpr):
    """Send the number of key tiles of the next request to both value warp groups (`LatentMemory.count`)."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(message_empty(memory, CFG), message ^ 1)
    count_of(memory).store(gl.full([32], 0, gl.int32, lanes) + count)
    thread_barrier()
    mbarrier.arrive(message_full(memory, CFG), count=1)
    return message ^ 1


@gluon.jit
def send_places(memory, factors, places, message, CFG: gl.constexpr):
    """Send the factors of the output and the places of its rows to both value warp groups."""
    mbarrier.wait(message_empty(memory, CFG), message ^ 1)
    memory.factors.store(factors)
    places_of(memory).store(places)
    thread_barrier()
    mbarrier.arrive(message_full(memory, CFG), count=1)
    return message ^ 1


@gluon.jit
def uniform(x):
    """Return a scalar that is equal in every thread, so that the compiler can keep it in a uniform register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def run_softmax(args, INDEX: gl.constexpr, CFG: gl.constexpr):
    """Compute scores and softmax of every request in this CTA's split, and send p to the value warp groups."""
    (
        k_scale, v_scale, sinks, lse, partial_lse, work, prefix_lens, q_indptr, tail_mask, tail_depth, memory, q_len,
        tail_len, group, mask_words, window_left, scale, cap, stride_out_row, stride_out_head,
    ) = args  # fmt: skip
    if CFG.SCALED & 1:
        scale = scale * gl.load(k_scale)
    split = gl.program_id(2)
    request = uniform(gl.load(work + split * 4))
    tile = uniform(gl.load(work + split * 4 + 1))
    tiles_left = uniform(gl.load(work + split * 4 + 2))
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout(CFG))
    VALUE_DIM: gl.constexpr = CFG.VALUE_DIM
    zero = tiles_left * 0
    state = (zero, zero, zero, zero)
    message = zero
    partial_half = zero
    while tiles_left > 0:
        at = locate_rows(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
        first, end = kv_tile_range(at.prefix_len, at.tail_slots, window_left, CFG)
        if (tile < end) & (at.packed < at.rows * group):
            stop = kv_tile_stop(
                tile, tiles_left, end, at.prefix_len, at.tail_slots, at.rows, at.first_row + at.last_row_offset, CFG
            )
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            message = send_count(memory, gl.where(is_unsplit, stop - tile, tile - stop), message, CFG)
            first_unmasked, first_masked = unmasked_tiles(at, window_left, CFG)
            first_masked = uniform(first_masked)
            stop = uniform(stop)
            queries = take_queries(memory, state, CFG)
            state = advance_both(state, CFG)
            # Rows of other requests in the tile never raise their maximum, so they never rescale the rows of this one.
            row_max = gl.where(at.row < at.rows, float("-inf"), NO_ROW)
            row_sum = partial_row_sums(gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG)))
            for key_tile in range(tile, stop):
                is_masked = (key_tile >= first_masked) | (key_tile < first_unmasked)
                seen = everything_seen(CFG)
                if is_masked:
                    here = locate_rows(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
                    row_mask = row_mask_of(
                        here, request, tail_mask, tail_depth, mask_words, q_len, tail_len, window_left, CFG
                    )
                    seen = seen_keys(key_tile, row_mask, CFG)
                s = compute_scores(queries, memory, state, CFG)
                if waits_for_scores(CFG):  # noqa: SIM102  one is decided by the compiler, the other on the device
                    if key_tile > tile:
                        async_copy.mbarrier_arrive(scores_done(memory, CFG), increment_count=False)
                if CFG.RAW_CHUNKS > 0 and CFG.REST_DIM > 0:  # noqa: SIM102  as above
                    if key_tile == gl.maximum(stop - CFG.REST_STAGES, tile):
                        async_copy.mbarrier_arrive(query_barrier(memory, 2, CFG), increment_count=False)
                s = hide_unseen(apply_soft_cap(s, scale, cap, CFG.CAP), seen, CFG)
                if CFG.WINDOW and CFG.TAIL_KIND == TREE:  # noqa: SIM102  one is decided by the compiler, the other on the device
                    if is_masked:
                        here = locate_rows(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
                        row_mask = row_mask_of(
                            here, request, tail_mask, tail_depth, mask_words, q_len, tail_len, window_left, CFG
                        )
                        s = hide_by_depth(s, key_tile, row_mask, CFG)
                row_max, row_sum, message = weigh_tile(s, row_max, row_sum, memory, message, scale, cap, CFG)
                state = advance_both(state, CFG)
            if waits_for_scores(CFG):
                async_copy.mbarrier_arrive(scores_done(memory, CFG), increment_count=False)
            total = reduce_row_sum(row_sum, rows_layout)
            # If a row sees no key of this split, its sum is 0: out becomes 0 and the LSE -inf, without 0/0.
            log_sum = gl.where(total > 0, row_max + gl.log2(total), float("-inf"))
            at = locate_rows(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG)
            first, end = kv_tile_range(at.prefix_len, at.tail_slots, window_left, CFG)
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            row_live = at.row < at.rows
            if CFG.SINKS:
                total += sink_weight(sinks, at.head, row_live & is_unsplit, row_max)
            partial_row = (split * 2 + partial_half) * gl.num_programs(0) * CFG.BLOCK_M + at.packed
            partial_row += own_rows(CFG)
            place = partial_row.to(gl.int64) * VALUE_DIM
            if is_unsplit:
                place = (at.begin + at.row).to(gl.int64) * stride_out_row + at.head * stride_out_head
            factors = 1.0 / gl.where(total > 0, total, 1.0)
            if CFG.SCALED & 2:
                factors = factors * gl.load(v_scale)
            message = send_places(memory, factors, gl.where(row_live, place, -1), message, CFG)
            if is_unsplit:
                if CFG.WITH_LSE:
                    gl.store(lse + (at.begin + at.row) * group + at.head, log_sum * 0.6931471805599453, mask=row_live)
            else:
                gl.store(partial_lse + partial_row, log_sum, mask=row_live)
        partial_half = partial_half * 0 + 1
        tiles_left = uniform(tiles_left - end - request_overhead(at.tail_slots, CFG) + tile)
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)
            tile = uniform(tile)
    send_count(memory, 0, message, CFG)
