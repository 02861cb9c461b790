"""Softmax warp group of the latent kernel: scores, masks and softmax of a row tile, and the messages of p."""

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
from .decode_verify import first_rows_of_tile, row_tile_start
from .gluon_compat import thread_barrier
from .latent_config import num_chunks
from .latent_pipeline import copy_queries
from .mask import CAUSAL, TREE, RowMask, apply_mask
from .pack_gqa import reciprocal, split_packed_row
from .pipeline import advance
from .softmax import apply_soft_cap, online_softmax, partial_row_sums, reduce_row_sum, score_unit, sink_weight
from .split_kv import BLOCK, kv_tile_range, kv_tile_stop, request_overhead, request_rows


@gluon.jit
def latent_scores(queries, pipeline, stage, phase, CFG: gl.constexpr):
    """Compute q·rowᵀ of a stage, ``[64, BLOCK_N]`` float32, each part as soon as it is loaded; release the rest."""
    s = gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG))
    if CFG.REST_DIM > 0:
        mbarrier.wait(pipeline.rest.full.index(stage), phase)
        rest = pipeline.rest.tiles[0].index(stage)
        s = warpgroup_mma(queries[2 * num_chunks(CFG)], rest.permute((1, 0)), s, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        mbarrier.wait(pipeline.halves[half].full.index(stage), phase)
        for chunk in gl.static_range(num_chunks(CFG)):
            keys = pipeline.halves[half].tiles[chunk].index(stage)
            s = warpgroup_mma(
                queries[half * num_chunks(CFG) + chunk], keys.permute((1, 0)), s,
                use_acc=half + chunk > 0 or CFG.REST_DIM > 0, is_async=True,
            )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    if CFG.REST_DIM > 0:
        async_copy.mbarrier_arrive(pipeline.rest.empty.index(stage), increment_count=False)
    return s


@gluon.jit
def send_weights(exchange, p, factors, phase):
    """Write p of a tile and the factors of the old accumulators, for both value warp groups."""
    mbarrier.wait(exchange.empty, phase ^ 1)
    exchange.weights.store(p.to(exchange.weights.dtype))
    exchange.factors.store(factors)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(exchange.full, count=1)
    return phase ^ 1


@gluon.jit
def send_factors(exchange, factors, phase):
    """Write the factors of the output, for both value warp groups."""
    mbarrier.wait(exchange.empty, phase ^ 1)
    exchange.factors.store(factors)
    thread_barrier()
    mbarrier.arrive(exchange.full, count=1)
    return phase ^ 1


@gluon.jit
def make_row_mask(
    prefix_len, begin, rows, tail_slots, row, first_row, first_row_offset, last_row_offset, tail_mask, tail_depth,
    mask_words, q_len, tail_len, request, window_left, CFG: gl.constexpr,
):  # fmt: skip
    """Return the visibility of a request's keys for the 64 packed rows of the tile (`decode_verify`)."""
    kv_len = prefix_len + tail_slots
    keys_seen_by_all = prefix_len
    if CFG.TAIL_KIND == CAUSAL:
        keys_seen_by_all = kv_len - rows + first_row + first_row_offset + 1
    # The division rounds down, so a tile that extends past the last key is always masked.
    first_masked_tile = gl.minimum(keys_seen_by_all, kv_len) // CFG.BLOCK_N
    if CFG.TAIL_KIND == BLOCK:
        first_masked_tile = kv_len // CFG.BLOCK_N
    row_live = row < rows
    slot_of_row = tail_slots - rows + row
    row_position = prefix_len + slot_of_row
    max_position = kv_len - rows + gl.minimum(first_row + last_row_offset, rows - 1)
    depths = tail_depth + gl.where(q_len == 0, begin, request * tail_len)
    if CFG.TAIL_KIND == TREE and CFG.WINDOW:
        row_position = prefix_len + gl.load(depths + slot_of_row, mask=row_live, other=0)
        max_position = gl.max(row_position, 0)
    row_words = tail_mask + (begin + row).to(gl.int64) * mask_words
    return RowMask(
        prefix_len=prefix_len, tail_len=tail_slots, slot_of_row=slot_of_row, row_position=row_position,
        row_live=row_live, row_words=row_words, depths=depths, mask_words=mask_words, window_left=window_left,
        max_position=max_position, first_masked_tile=first_masked_tile,
    )  # fmt: skip


@gluon.jit
def run_softmax(args, INDEX: gl.constexpr, CFG: gl.constexpr):
    """Compute scores and softmax of every request in this CTA's split, and send p to the value warp groups."""
    (
        q, sinks, lse, partial_lse, work, prefix_lens, q_indptr, tail_mask, tail_depth, queries, pipeline, exchange,
        q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row, stride_q_head,
    ) = args  # fmt: skip
    split = gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout(CFG))
    lane = gl.arange(0, 64, rows_layout)
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    stage = tiles_left * 0
    phase = tiles_left * 0
    message = tiles_left * 0
    partial_half = tiles_left * 0
    unit = score_unit(scale, cap, CFG.CAP)
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        first, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            head_offset = packed - first_row * group
            first_row_offset, _ = split_packed_row(head_offset, group, inv_group)
            last_row_offset, _ = split_packed_row(head_offset + 63, group, inv_group)
            row, head = split_packed_row(head_offset + lane, group, inv_group)
            row += first_row
            copy_queries(
                queries, q, begin + first_row, head_offset, (rows - first_row) * group, group, inv_group, stride_q_row,
                stride_q_head, CFG,
            )  # fmt: skip
            stop = kv_tile_stop(tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG)
            row_mask = make_row_mask(
                prefix_len, begin, rows, tail_slots, row, first_row, first_row_offset, last_row_offset, tail_mask,
                tail_depth, mask_words, q_len, tail_len, request, window_left, CFG,
            )  # fmt: skip
            row_max = gl.full([64], float("-inf"), gl.float32, rows_layout)
            row_sum = partial_row_sums(gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG)))
            for key_tile in range(tile, stop):
                s = apply_soft_cap(latent_scores(queries, pipeline, stage, phase, CFG), scale, cap, CFG.CAP)
                s = apply_mask(s, key_tile, row_mask, CFG)
                p, old_scale, row_max, row_sum, max_moved = online_softmax(s, unit, row_max, row_sum)
                message = send_weights(exchange, p, old_scale, message)
                stage, phase = advance(stage, phase, CFG.STAGES)
            total = reduce_row_sum(row_sum, rows_layout)
            # If a row sees no key of this split, its sum is 0: out becomes 0 and the LSE -inf, without 0/0.
            log_sum = gl.where(total > 0, row_max + gl.log2(total), float("-inf"))
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            row_live = row < rows
            if CFG.SINKS:
                total += sink_weight(sinks, head, row_live & is_unsplit, row_max)
            message = send_factors(exchange, 1.0 / gl.where(total > 0, total, 1.0), message)
            if is_unsplit:
                if CFG.WITH_LSE:
                    gl.store(lse + (begin + row) * group + head, log_sum * 0.6931471805599453, mask=row_live)
            else:
                partial_row = (split * 2 + partial_half) * gl.num_programs(0) * CFG.BLOCK_M + packed + lane
                gl.store(partial_lse + partial_row, log_sum, mask=row_live)
        partial_half = partial_half * 0 + 1
        tiles_left -= end + request_overhead(tail_slots, CFG) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)
