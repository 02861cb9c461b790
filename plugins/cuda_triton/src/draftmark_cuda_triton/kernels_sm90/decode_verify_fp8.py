"""Decode and verify over e4m3 KV on Hopper: the schedule of `kernels.decode_verify`, the mainloop of `mma_fp8_swap_ab`.

Example: 64 requests x 8192 tokens, 8 KV heads of 128. 1.07 GB take 244 µs at 4.4 TB/s. A CTA with 64 rows uses 16 KiB
of shared memory for q, 8 KiB for P (softmax probabilities), and 16 KiB for each of 3 stages of 64 keys. So each SM
holds two CTAs. Each KV byte crosses shared memory twice: one write, and one read to registers. With
`producer_upcast.upcast_tiles` it would cross six times. All rows of a request form one row tile (`sm90.fp8_config`),
which begins with the request's first row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import make_constants, num_empty_arrivals, row_io_layout
from .decode_verify import produce_decode_verify
from .epilogue import zero_padding_rows
from .mask import CAUSAL, TREE, first_tile_in_window
from .mma_fp8_swap_ab import (
    UNSEEN_MAX,
    RequestRows,
    load_q_fp16,
    mainloop_fp8,
    mainloop_unmasked,
    partial_row_sums,
    store_out_pairs,
)
from .pack_gqa import head_columns, opaque_zero, reciprocal, split_packed_row
from .pipeline import grid_dependency_sync, make_pipeline
from .softmax import sink_weight
from .split_kv import BLOCK, kv_tile_range, request_overhead, request_rows
from .warp_specialize import start_tma


@gluon.jit
def packed_rows(rows, group, inv_group, CFG: gl.constexpr, layout: gl.constexpr):
    """Return the query row and head of each packed row, and False for rows past the request's last row.

    Callers recompute this wherever they need it: index arithmetic costs less than the registers to keep the result.
    """
    row, head_in_group = split_packed_row(opaque_zero() + gl.arange(0, CFG.BLOCK_M, layout), group, inv_group)
    return row, head_in_group, row < rows


@gluon.jit
def consumer_fp8(args, CONSUMER_WG: gl.constexpr, CFG: gl.constexpr):
    """Run the only consumer warp group: attend all packed rows of every request in this CTA's split.

    Arguments as in `decode_verify.consume_decode_verify`, plus the shared memory of `weights` (P, the softmax
    probabilities) and `flags` (of `any_above`).
    """
    (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_smem, weights, flags, pipeline, q_len, tail_len, group, mask_words, window_left, scale, cap,
        stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    ) = args  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CFG.BLOCK_M, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows_at: gl.constexpr = gl.SliceLayout(0, scores)
    # True if tiles at a window's start have their own loop. With a head_dim of 256 a further loop would spill
    # registers.
    WINDOW_LOOP: gl.constexpr = CFG.WINDOW and CFG.BLOCK_D <= 128
    head, split, num_kv_heads = gl.program_id(1), gl.program_id(2), gl.num_programs(1)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    inv_group = reciprocal(group)
    k_factor = 1.0
    v_factor = 1.0
    if CFG.SCALED & 1:
        k_factor = gl.load(k_scale)
    if CFG.SCALED & 2:
        v_factor = gl.load(v_scale)
    stage = tiles_left * 0
    phase = tiles_left * 0
    partial_half = tiles_left * 0
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        first, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        tiles_left_after = tiles_left - (end + request_overhead(tail_slots, CFG) - tile)
        if (tile < end) & (rows > 0):
            q_packed = opaque_zero() + gl.arange(0, CFG.BLOCK_M, gl.SliceLayout(1, q_layout))
            stop = gl.minimum(tile + tiles_left, end)
            is_unsplit = (tile == first) & (stop == end)
            keys_seen_by_all = prefix_len
            if CFG.TAIL_KIND == CAUSAL:
                keys_seen_by_all = prefix_len + tail_slots - rows + 1
            # The division rounds down, so a tile that extends past the last key is always masked.
            first_masked_tile = gl.minimum(keys_seen_by_all, prefix_len + tail_slots) // CFG.BLOCK_N
            if CFG.TAIL_KIND == BLOCK:
                first_masked_tile = (prefix_len + tail_slots) // CFG.BLOCK_N
            live = rows * group
            q_scale = load_q_fp16(
                q_smem, q, begin, q_packed, q_packed < live, head, group, inv_group, stride_q_row, stride_q_head, CFG,
                q_layout,
            )  # fmt: skip
            depths = tail_depth + gl.where(q_len == 0, begin, request * tail_len)
            even = gl.full([CFG.BLOCK_D // 2, CFG.BLOCK_M], 0.0, gl.float32, scores)
            odd = gl.full([CFG.BLOCK_D // 2, CFG.BLOCK_M], 0.0, gl.float32, scores)
            row_sum = partial_row_sums(gl.full([CFG.BLOCK_N, CFG.BLOCK_M], 0.0, gl.float32, scores))
            unit = q_scale * (scale * k_factor)
            first_unmasked_tile = tile
            if WINDOW_LOOP:
                max_position = prefix_len + tail_slots - 1
                if CFG.TAIL_KIND == TREE:
                    row, _, row_live = packed_rows(rows, group, inv_group, CFG, rows_at)
                    depth = gl.load(depths + tail_slots - rows + row, mask=row_live, other=0)
                    max_position = prefix_len + gl.max(depth, 0)
                # If masked tiles precede the first unmasked tile, every live row has seen a key in them. So its maximum
                # is finite when the unmasked loop starts.
                first_unmasked_tile = gl.minimum(
                    gl.maximum(first_tile_in_window(max_position, window_left, CFG), tile), stop
                )
            elif CFG.WINDOW:
                first_masked_tile = tile
            masked_from = gl.minimum(gl.maximum(first_masked_tile, first_unmasked_tile), stop)
            is_first_range = first_unmasked_tile == tile
            initial_pivot = gl.where(is_first_range & (masked_from > tile), 0.0, UNSEEN_MAX)
            pivot = gl.full([CFG.BLOCK_M], 0.0, gl.float32, rows_at) + initial_pivot
            state = (even, odd, pivot, row_sum)
            request_rows_of = RequestRows(
                group=group, inv_group=inv_group, begin=begin, rows=rows, prefix_len=prefix_len, tail_len=tail_slots,
                tail_mask=tail_mask, depths=depths, mask_words=mask_words, window_left=window_left,
            )  # fmt: skip
            if WINDOW_LOOP:
                state, stage, phase = mainloop_fp8(
                    state, q_smem, weights, flags, pipeline, stage, phase, tile, first_unmasked_tile, request_rows_of,
                    unit, cap, CFG, True, scores
                )  # fmt: skip
                even, odd, pivot, row_sum = state
                # Padding rows possibly saw no key. A finite pivot keeps NaN out of the unmasked loop.
                _, _, row_live = packed_rows(rows, group, inv_group, CFG, rows_at)
                state = (even, odd, gl.where(row_live, pivot, 0.0), row_sum)
            if CFG.BLOCK_D > 128 and not CFG.WINDOW:
                state, stage, phase = mainloop_fp8(
                    state, q_smem, weights, flags, pipeline, stage, phase, tile, masked_from, request_rows_of, unit,
                    cap, CFG, False, scores
                )  # fmt: skip
            elif CFG.BLOCK_D <= 128:
                state, stage, phase = mainloop_unmasked(
                    state, q_smem, weights, flags, pipeline, stage, phase, first_unmasked_tile, masked_from,
                    is_first_range, unit, cap, CFG, scores
                )  # fmt: skip
            state, stage, phase = mainloop_fp8(
                state, q_smem, weights, flags, pipeline, stage, phase, masked_from, stop, request_rows_of, unit, cap,
                CFG, True, scores
            )  # fmt: skip
            even, odd, pivot, row_sum = state
            row, head_in_group, row_live = packed_rows(rows, group, inv_group, CFG, rows_at)
            packed = row * group + head_in_group
            # If a row sees no key of this split, row_sum is 0: out becomes 0 and the LSE -inf, without 0/0.
            total = gl.convert_layout(gl.sum(gl.sum(row_sum, 0), 0), rows_at)
            log_sum = gl.where(total > 0, pivot + gl.log2(total), float("-inf"))
            if CFG.SINKS:
                total += sink_weight(sinks, head * group + head_in_group, row_live & is_unsplit, pivot)
            row_scale = (v_factor / gl.where(total > 0, total, 1.0))[None, :]
            even = even * row_scale
            odd = odd * row_scale
            if is_unsplit:
                out_packed = opaque_zero() + gl.arange(0, CFG.BLOCK_M, gl.SliceLayout(1, row_io_layout(CFG.BLOCK_D)))
                store_out_pairs(
                    q_smem, even, odd, out, begin, out_packed, out_packed < live, head, group, inv_group,
                    stride_out_row, stride_out_head, CFG,
                )  # fmt: skip
                if CFG.WITH_LSE:
                    cell = (begin + row) * (num_kv_heads * group) + head * group + head_in_group
                    gl.store(lse + cell, log_sum * 0.6931471805599453, mask=row_live)
            else:
                partial_row = ((split * 2 + partial_half) * num_kv_heads + head) * CFG.BLOCK_M + packed
                gl.store(partial_lse + partial_row, log_sum, mask=row_live)
                col = 2 * gl.arange(0, CFG.BLOCK_D // 2, gl.SliceLayout(1, scores))
                own_col, there = head_columns(packed, col, group, inv_group, CFG, 0)
                cells = partial_out + partial_row.to(gl.int64)[None, :] * CFG.HEAD_DIM + own_col
                there = there & row_live[None, :]
                gl.store(cells, even, mask=there)
                gl.store(cells + 1, odd, mask=there)
        partial_half = partial_half * 0 + 1
        tiles_left = tiles_left_after
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, end = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)


@gluon.jit(
    do_not_specialize=[
        "q_len",
        "tail_len",
        "num_reqs",
        "num_rows",
        "group",
        "mask_words",
        "window_left",
        "stride_q_row",
        "stride_q_head",
        "stride_out_row",
        "stride_out_head",
        "stride_table",
        "num_pages",
    ],
    do_not_specialize_on_alignment=[
        "k_scale",
        "v_scale",
        "sinks",
        "lse",
        "work",
        "prefix_lens",
        "q_indptr",
        "page_table",
        "tail_mask",
        "tail_depth",
    ],
)
def attend_decode_verify_fp8(
    q, k_source, v_source, k_extra, v_extra, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work,
    prefix_lens, q_indptr, page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words,
    window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_KIND: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr, OVERHEAD_TILES: gl.constexpr,
    PDL: gl.constexpr, STAGES: gl.constexpr, KV_HEADS_PER_TILE: gl.constexpr, STRIDE_ALIGN: gl.constexpr,
):  # fmt: skip
    """Attend decode or verify rows over e4m3 KV; arguments as in `decode_verify.attend_decode_verify`, except BLOCK_M.

    Args:
        BLOCK_M: packed rows of a CTA: 16, 32 or 64.
    """
    CFG: gl.constexpr = make_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BOX_KEYS=BOX_KEYS, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D,
        STAGES=STAGES, FP8_STAGES=STAGES, TAIL_KIND=TAIL_KIND, WINDOW=WINDOW, CAP=CAP, SCALED=SCALED,
        SINKS=SINKS, WITH_LSE=WITH_LSE, OVERHEAD_TILES=OVERHEAD_TILES, KV_HEADS_PER_TILE=KV_HEADS_PER_TILE,
        STRIDE_ALIGN=STRIDE_ALIGN,
    )  # fmt: skip
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D // 2], gl.float16)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], gl.float16)
    q_smem = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, BLOCK_D // 2], rows)
    weights = gl.allocate_shared_memory(gl.float16, [BLOCK_M, BLOCK_N], keys)
    flags = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    pipeline = make_pipeline(gl.int16, num_empty_arrivals(CFG), STAGES, CFG, ELEMS_PER_CELL=2)
    if PDL:
        # Everything above, such as initializing the barriers, overlaps the preceding grid (programmatic dependent
        # launch).
        grid_dependency_sync()
    if (q_len == 0) & (gl.program_id(0) == 0):
        zero_padding_rows(out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG)
    producer_args = (
        work, prefix_lens, q_indptr, page_table, (k_source, k_extra), (v_source, v_extra), pipeline, pipeline, q_len,
        tail_len, group, window_left, stride_table, num_pages,
    )  # fmt: skip
    consumer_args = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_smem, weights, flags, pipeline, q_len, tail_len, group, mask_words, window_left, scale, cap,
        stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    start_tma(consumer_fp8, consumer_args, produce_decode_verify, producer_args, CFG, False, 0)
