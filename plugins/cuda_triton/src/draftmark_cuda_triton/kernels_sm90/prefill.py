"""Prefill (EXTEND) on Hopper: ragged causal attention by persistent CTAs over row tiles, usually of 128 packed rows.

Two consumer warp groups share one pipeline. So the CTA reads half of the K and V bytes from L2 that row tiles of 64
would read. The softmax of one group overlaps the matrix products of the other. Persistent CTAs get row tiles from
`tile_scheduler`. q of the next row tile loads while the output is stored. Example: 8 requests x 4096 tokens, 32 heads
of 128. 1.1 TFLOP take 1.4 ms at 790 TFLOP/s; 8.6 GB are read from L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import make_constants, num_column_parts, scores_layout, takes_work_tiles, uses_pingpong
from .epilogue import scale_acc, store_partial_acc, store_unsplit
from .mainloop import mainloop, pingpong_arrive
from .mask import CAUSAL, RowMask
from .mma_e4m3 import rounded_rows, store_q_rounded
from .pack_gqa import load_q, reciprocal, split_packed_row, store_q_smem
from .pipeline import allocate_rows, grid_dependency_sync, make_pipelines, stage_of
from .producer import produce_tiles
from .softmax import sink_weight
from .split_kv import first_visible_key
from .tile_scheduler import (
    first_work_tile,
    get_next_tile,
    make_tile_scheduler,
    receive,
    schedule_next,
    work_tile_kv_range,
)
from .warp_specialize import start_tma


@gluon.jit
def produce_prefill(args, ROLE: gl.constexpr, CFG: gl.constexpr):
    """Run a producer partition of prefill: produce the key tiles of this CTA's work tiles.

    ROLE selects the task: load K, load V, upcast, or gather (`producer.produce_tiles`).
    """
    (
        work, row_tiles, prefix_lens, q_indptr, page_table, k_source, v_source, load_pipeline, pipeline, scheduler,
        group, num_kv_heads, num_splits, window_left, stride_table, num_pages,
    ) = args  # fmt: skip
    SCHEDULES: gl.constexpr = takes_work_tiles(ROLE)
    inv_group = reciprocal(group)
    tiles, heads_in_l2 = gl.load(row_tiles + 1), gl.load(row_tiles + 2)
    schedule = (row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, inv_group, window_left)
    sched_stage, sched_phase = tiles * 0, tiles * 0
    state = (tiles * 0, tiles * 0, tiles * 0, tiles * 0)
    if SCHEDULES:
        tile_index, cursor, split_tiles_per_request = first_work_tile(work, row_tiles, num_splits, num_kv_heads, CFG)
        work_tile, kv_range, cursor, sched_stage, sched_phase = schedule_next(
            tile_index, cursor, split_tiles_per_request, schedule, scheduler, sched_stage, sched_phase, CFG
        )
    else:
        work_tile, kv_range, sched_stage, sched_phase = receive(scheduler, sched_stage, sched_phase, CFG)
    while work_tile.rows > 0:
        page_row, head = page_table + work_tile.request.to(gl.int64) * stride_table, work_tile.head
        kv_len = work_tile.prefix_len + work_tile.rows
        first_key = first_visible_key(work_tile.prefix_len, window_left, CFG)
        if CFG.SPLIT_KV:
            first, stop = kv_range.first, kv_range.stop
        else:
            first, stop = work_tile_kv_range(work_tile, group, inv_group, window_left, CFG)
        # The next work tile of a split already belongs to this CTA. So its record is loaded and published before this
        # work tile's key tiles are loaded.
        if SCHEDULES and CFG.SPLIT_KV:
            if split_tiles_per_request == 0:
                tile_index = get_next_tile(row_tiles, tiles * num_kv_heads)
            work_tile, kv_range, cursor, sched_stage, sched_phase = schedule_next(
                tile_index, cursor, split_tiles_per_request, schedule, scheduler, sched_stage, sched_phase, CFG
            )
        state = produce_tiles(
            k_source, v_source, load_pipeline, pipeline, state, page_row, head, first, stop, first_key, kv_len,
            num_pages, ROLE, CFG
        )  # fmt: skip
        if SCHEDULES and not CFG.SPLIT_KV:
            tile_index = get_next_tile(row_tiles, tiles * num_kv_heads)
            work_tile, kv_range, cursor, sched_stage, sched_phase = schedule_next(
                tile_index, cursor, split_tiles_per_request, schedule, scheduler, sched_stage, sched_phase, CFG
            )
        elif not SCHEDULES:
            work_tile, kv_range, sched_stage, sched_phase = receive(scheduler, sched_stage, sched_phase, CFG)


@gluon.jit
def load_work_tile_q(
    q, work_tile, group, inv_group, stride_row, stride_head, CONSUMER_WG: gl.constexpr, CFG: gl.constexpr
):
    """Load a warp group's 64 packed rows of q of a work tile into registers; zeros if the work tile has no rows."""
    return load_q(
        q, work_tile.q_begin + work_tile.row, work_tile.head_offset + CONSUMER_WG * 64,
        (work_tile.rows - work_tile.row) * group, work_tile.head, group, inv_group, stride_row, stride_head, CFG,
    )  # fmt: skip


@gluon.jit
def consume_prefill(args, CONSUMER_WG: gl.constexpr, CFG: gl.constexpr):
    """Run consumer warp group CONSUMER_WG: attend its 64 packed rows of every work tile of this CTA."""
    (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, row_tiles, prefix_lens, q_indptr, q_smem,
        pipeline, scheduler, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
        stride_out_head, stride_lse_row,
    ) = args  # fmt: skip
    sched_stage, sched_phase = num_kv_heads * 0, num_kv_heads * 0
    stage, phase = num_kv_heads * 0, num_kv_heads * 0
    if uses_pingpong(CFG) and CONSUMER_WG == 1:
        pingpong_arrive(CONSUMER_WG)
    k_factor = 1.0
    v_factor = 1.0
    if CFG.SCALED & 1:
        k_factor = gl.load(k_scale)
    if CFG.SCALED & 2:
        v_factor = gl.load(v_scale)
    wg_q_smem = stage_of(q_smem, CONSUMER_WG)
    lane = CONSUMER_WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_layout(CFG)))
    inv_group = reciprocal(group)
    work_tile, kv_range, sched_stage, sched_phase = receive(scheduler, sched_stage, sched_phase, CFG)
    queries = load_work_tile_q(q, work_tile, group, inv_group, stride_q_row, stride_q_head, CONSUMER_WG, CFG)
    while work_tile.rows > 0:
        head, first_row, head_offset, q_begin = work_tile.head, work_tile.row, work_tile.head_offset, work_tile.q_begin
        rows, prefix_len = work_tile.rows, work_tile.prefix_len
        q_rows = wg_q_smem
        if CFG.ROUNDS:
            factor = store_q_rounded(wg_q_smem, queries, q.dtype.element_ty, CFG)
            q_rows = rounded_rows(wg_q_smem, CFG)
        else:
            store_q_smem(wg_q_smem, queries, CFG)
        row, head_in_group = split_packed_row(head_offset + lane, group, inv_group)
        row += first_row
        row_live = row < rows
        if CFG.SPLIT_KV:
            first, stop, partial = kv_range.first, kv_range.stop, kv_range.partial
        else:
            first, stop = work_tile_kv_range(work_tile, group, inv_group, window_left, CFG)
        lowest, _ = split_packed_row(head_offset + CONSUMER_WG * 64, group, inv_group)
        last, _ = split_packed_row(head_offset + CONSUMER_WG * 64 + 63, group, inv_group)
        first_masked_tile = gl.minimum(prefix_len + first_row + lowest + 1, prefix_len + rows) // CFG.BLOCK_N
        max_position = prefix_len + gl.minimum(first_row + last, rows - 1)
        # Prefill rows are a chain (plain causal), so the fields for tree masks and depths are unused.
        row_mask = RowMask(
            prefix_len=prefix_len, tail_len=rows, slot_of_row=row, row_position=prefix_len + row, row_live=row_live,
            row_words=row_tiles + row * 0, depths=row_tiles, mask_words=0, window_left=window_left,
            max_position=max_position, first_masked_tile=first_masked_tile,
        )  # fmt: skip
        unit = scale * k_factor
        if CFG.ROUNDS:
            unit *= gl.convert_layout(factor, lane.type.layout)
        acc, row_max, row_sum, stage, phase = mainloop(
            q_rows, pipeline, stage, phase, first, stop, row_mask, unit, cap, CFG, CONSUMER_WG
        )  # fmt: skip
        # The next row tile's q loads while this output is stored.
        work_tile, kv_range, sched_stage, sched_phase = receive(scheduler, sched_stage, sched_phase, CFG)
        queries = load_work_tile_q(q, work_tile, group, inv_group, stride_q_row, stride_q_head, CONSUMER_WG, CFG)
        row_weight = row_sum
        if CFG.SINKS:
            is_counted = row_live
            if CFG.SPLIT_KV:
                is_counted = row_live & (partial == 0)
            row_weight += sink_weight(sinks, head * group + head_in_group, is_counted, row_max)
        row_scale = v_factor / gl.where(row_weight > 0, row_weight, 1.0)
        acc = scale_acc(acc, row_scale)
        cells = (q_begin + row) * stride_lse_row + head * group + head_in_group
        result = (
            wg_q_smem, acc, row_max, row_sum, row_live, cells, out, lse, q_begin + first_row,
            head_offset + CONSUMER_WG * 64, (rows - first_row) * group, head, group, inv_group, stride_out_row,
            stride_out_head,
        )  # fmt: skip
        if CFG.SPLIT_KV:
            if partial == 0:
                store_unsplit(result, CFG)
            else:
                partial_row = ((partial - 1) * num_kv_heads + head) * CFG.BLOCK_M + lane
                gl.store(
                    partial_lse + partial_row,
                    gl.where(row_sum > 0, row_max + gl.log2(row_sum), float("-inf")),
                    mask=row_live,
                )
                for part in gl.static_range(num_column_parts(CFG)):
                    store_partial_acc(
                        acc[part], partial_out, partial_row, row_live, head_offset + CONSUMER_WG * 64, group, inv_group,
                        part, CFG
                    )  # fmt: skip
        else:
            store_unsplit(result, CFG)


@gluon.jit(
    do_not_specialize=[
        "group",
        "num_kv_heads",
        "window_left",
        "stride_q_row",
        "stride_q_head",
        "stride_out_row",
        "stride_out_head",
        "stride_lse_row",
        "stride_table",
        "num_pages",
        "num_splits",
    ],
    do_not_specialize_on_alignment=[
        "k_scale",
        "v_scale",
        "sinks",
        "lse",
        "work",
        "row_tiles",
        "prefix_lens",
        "q_indptr",
        "page_table",
    ],
)
def attend_prefill(
    q, k_source, v_source, k_extra, v_extra, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work,
    row_tiles, prefix_lens, q_indptr, page_table, group, num_kv_heads, window_left, scale, cap, stride_q_row,
    stride_q_head, stride_out_row, stride_out_head, stride_lse_row, stride_table, num_pages, num_splits,
    PAGE_SIZE: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr,
    SINKS: gl.constexpr, WITH_LSE: gl.constexpr, SPLIT_KV: gl.constexpr, OVERHEAD_TILES: gl.constexpr,
    PDL: gl.constexpr, STAGES: gl.constexpr, FP8_STAGES: gl.constexpr, UPCAST_FP8: gl.constexpr,
    INTRA_WG_OVERLAP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, BLOCK_D_REST: gl.constexpr,
    STRIDE_ALIGN: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """Attend prefill rows; arguments as in `kernels.prefill.attend_prefill`, except the TMA descriptors.

    k_source, v_source, k_extra and v_extra are those of `decode_verify.attend_decode_verify`.
    """
    CFG: gl.constexpr = make_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_M=64 * NUM_CONSUMER_WGS, BLOCK_N=BLOCK_N, BOX_KEYS=BOX_KEYS, HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D, BLOCK_D_REST=BLOCK_D_REST, STAGES=STAGES, FP8_STAGES=FP8_STAGES, TAIL_KIND=CAUSAL,
        WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS, WITH_LSE=WITH_LSE, OVERHEAD_TILES=OVERHEAD_TILES,
        INTRA_WG_OVERLAP=INTRA_WG_OVERLAP, NUM_CONSUMER_WGS=NUM_CONSUMER_WGS, STRIDE_ALIGN=STRIDE_ALIGN,
        SPLIT_KV=SPLIT_KV, ROUNDS=ROUNDS,
    )  # fmt: skip
    q_smem = allocate_rows(q.dtype.element_ty, NUM_CONSUMER_WGS, 64, CFG)
    pipeline, load_pipeline = make_pipelines(
        q.dtype.element_ty, k_source.dtype, k_extra is not None and BLOCK_D_REST == 0, UPCAST_FP8, CFG
    )
    scheduler = make_tile_scheduler(NUM_CONSUMER_WGS + UPCAST_FP8 + 1, CFG)
    if PDL:
        grid_dependency_sync()
    producer_args = (
        work, row_tiles, prefix_lens, q_indptr, page_table, (k_source, k_extra), (v_source, v_extra), load_pipeline,
        pipeline, scheduler, group, num_kv_heads, num_splits, window_left, stride_table, num_pages,
    )  # fmt: skip
    consumer_args = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, row_tiles, prefix_lens, q_indptr, q_smem,
        pipeline, scheduler, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
        stride_out_head, stride_lse_row,
    )  # fmt: skip
    start_tma(consume_prefill, consumer_args, produce_prefill, producer_args, CFG, UPCAST_FP8, CONSUMER_REGISTERS)
