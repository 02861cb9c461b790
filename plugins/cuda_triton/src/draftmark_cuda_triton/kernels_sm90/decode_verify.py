"""Decode and verify on Hopper, uniform or ragged: split-KV over a device-built schedule, as in `kernels.decode_verify`.

Bytes read: see `kernels.decode_verify`. Shared memory of a CTA holds 64 rows of q for each consumer
warp group, and STAGES tiles of K and V. With one group that is 16 + 3 · 32 KiB, and two CTAs fit on each SM. With two
groups it is 32 + 6 · 32 KiB, and one CTA fits on each SM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import make_constants, num_column_parts, prefetches_q, scores_layout, uses_pingpong
from .epilogue import scale_acc, store_out, store_partial_acc, zero_padding_rows
from .mainloop import mainloop, pingpong_arrive
from .mask import CAUSAL, TREE, RowMask
from .mma_e4m3 import rounded_rows, store_q_rounded
from .pack_gqa import load_q, load_q_to_smem, reciprocal, split_packed_row, store_q_smem
from .pipeline import allocate_rows, grid_dependency_sync, make_pipelines, stage_of
from .producer import produce_tiles
from .softmax import sink_weight
from .split_kv import BLOCK, first_visible_key, kv_tile_range, kv_tile_stop, request_overhead, request_rows
from .warp_specialize import start_tma


@gluon.jit
def first_rows_of_tile(group, CFG: gl.constexpr):
    """Return two query rows: where this CTA's row tile begins in requests of even index, and in those of odd index.

    In a request of odd index, CTA 0 processes the last row tile. Later row tiles see more of the tail, so alternating
    the order balances the work of the CTAs over consecutive requests.
    """
    m = gl.program_id(0)
    return m * CFG.BLOCK_M // group, (gl.num_programs(0) - 1 - m) * CFG.BLOCK_M // group


@gluon.jit
def row_tile_start(request, row_tiles, CFG: gl.constexpr):
    """Return the first packed row of this CTA's row tile in a request, and the query row that contains it."""
    even_row, odd_row = row_tiles
    m, is_even = gl.program_id(0), request % 2 == 0
    return gl.where(is_even, m, gl.num_programs(0) - 1 - m) * CFG.BLOCK_M, gl.where(is_even, even_row, odd_row)


@gluon.jit
def produce_decode_verify(args, ROLE: gl.constexpr, CFG: gl.constexpr):
    """Run a producer partition of decode and verify: produce the key tiles of this CTA's split, request by request.

    ROLE selects the task: load K, load V, upcast, or gather (`producer.produce_tiles`).
    """
    (
        work, prefix_lens, q_indptr, page_table, k_source, v_source, load_pipeline, pipeline, q_len, tail_len, group,
        window_left, stride_table, num_pages,
    ) = args  # fmt: skip
    head, split = gl.program_id(1), gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    state = (tiles_left * 0, tiles_left * 0, tiles_left * 0, tiles_left * 0)
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        _, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        _, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            last_row_offset, _ = split_packed_row(packed - first_row * group + CFG.BLOCK_M - 1, group, inv_group)
            stop = kv_tile_stop(tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG)
            page_row = page_table + request.to(gl.int64) * stride_table
            state = produce_tiles(
                k_source, v_source, load_pipeline, pipeline, state, page_row, head, tile, stop,
                first_visible_key(prefix_len, window_left, CFG), prefix_len + tail_slots, num_pages, ROLE, CFG,
            )  # fmt: skip
        tiles_left -= end + request_overhead(tail_slots, CFG) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, end = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)


@gluon.jit
def load_next_request(
    q, prefix_lens, q_indptr, request, exists, q_len, tail_len, head, row_tiles, group, inv_group, stride_row,
    stride_head, CONSUMER_WG: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Load a request's prefix length, first row, row and tail token counts, and with `prefetches_q` its rows of q.

    Args:
        exists: False if the split ends before this request; the result then has 0 rows.
    """
    request = gl.where(exists, request, 0)
    begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
    queries = ()
    if prefetches_q(CFG):
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        head_offset = packed - first_row * group + CONSUMER_WG * 64
        count = gl.where(exists, (rows - first_row) * group, 0)
        queries = load_q(q, begin + first_row, head_offset, count, head, group, inv_group, stride_row, stride_head, CFG)
    return gl.load(prefix_lens + request), begin, rows, tail_slots, queries


@gluon.jit
def consume_decode_verify(args, CONSUMER_WG: gl.constexpr, CFG: gl.constexpr):
    """Run consumer warp group CONSUMER_WG: attend its 64 packed rows of every request in this CTA's split."""
    (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_smem, pipeline, q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row,
        stride_q_head, stride_out_row, stride_out_head,
    ) = args  # fmt: skip
    head, split, num_kv_heads = gl.program_id(1), gl.program_id(2), gl.num_programs(1)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    lane = gl.arange(0, 64, gl.SliceLayout(1, scores_layout(CFG)))
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    wg_q_smem = stage_of(q_smem, CONSUMER_WG)
    k_factor = 1.0
    v_factor = 1.0
    if CFG.SCALED & 1:
        k_factor = gl.load(k_scale)
    if CFG.SCALED & 2:
        v_factor = gl.load(v_scale)
    stage = tiles_left * 0
    phase = tiles_left * 0
    partial_half = tiles_left * 0
    if uses_pingpong(CFG) and CONSUMER_WG == 1:
        pingpong_arrive(CONSUMER_WG)
    prefix_len, begin, rows, tail_slots, queries = load_next_request(
        q, prefix_lens, q_indptr, request, tiles_left > 0, q_len, tail_len, head, row_tiles, group, inv_group,
        stride_q_row, stride_q_head, CONSUMER_WG, CFG,
    )  # fmt: skip
    while tiles_left > 0:
        first, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        tiles_left_after = tiles_left - (end + request_overhead(tail_slots, CFG) - tile)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            head_offset = packed - first_row * group
            last_row_offset, _ = split_packed_row(head_offset + CFG.BLOCK_M - 1, group, inv_group)
            head_offset += CONSUMER_WG * 64
            first_row_offset, _ = split_packed_row(head_offset, group, inv_group)
            last_row_of_wg, _ = split_packed_row(head_offset + 63, group, inv_group)
            row, head_in_group = split_packed_row(head_offset + lane, group, inv_group)
            row += first_row
            first_q_row, count = begin + first_row, (rows - first_row) * group
            q_rows = wg_q_smem
            if CFG.ROUNDS:
                factor = store_q_rounded(wg_q_smem, queries, q.dtype.element_ty, CFG)
                q_rows = rounded_rows(wg_q_smem, CFG)
            elif prefetches_q(CFG):
                store_q_smem(wg_q_smem, queries, CFG)
            else:
                load_q_to_smem(
                    wg_q_smem,
                    q,
                    first_q_row,
                    head_offset,
                    count,
                    head,
                    group,
                    inv_group,
                    stride_q_row,
                    stride_q_head,
                    CFG,
                )
            stop = kv_tile_stop(tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG)
            keys_seen_by_all = prefix_len
            if CFG.TAIL_KIND == CAUSAL:
                keys_seen_by_all = prefix_len + tail_slots - rows + first_row + first_row_offset + 1
            # The division rounds down, so a tile that extends past the last key is always masked.
            first_masked_tile = gl.minimum(keys_seen_by_all, prefix_len + tail_slots) // CFG.BLOCK_N
            if CFG.TAIL_KIND == BLOCK:
                first_masked_tile = (prefix_len + tail_slots) // CFG.BLOCK_N
            row_live = row < rows
            slot_of_row = tail_slots - rows + row
            row_position = prefix_len + slot_of_row
            max_position = prefix_len + tail_slots - rows + gl.minimum(first_row + last_row_of_wg, rows - 1)
            depths = tail_depth + gl.where(q_len == 0, begin, request * tail_len)
            if CFG.TAIL_KIND == TREE and CFG.WINDOW:
                row_position = prefix_len + gl.load(depths + slot_of_row, mask=row_live, other=0)
                max_position = gl.max(row_position, 0)
            row_words = tail_mask + (begin + row).to(gl.int64) * mask_words
            row_mask = RowMask(
                prefix_len=prefix_len, tail_len=tail_slots, slot_of_row=slot_of_row, row_position=row_position,
                row_live=row_live, row_words=row_words, depths=depths, mask_words=mask_words, window_left=window_left,
                max_position=max_position, first_masked_tile=first_masked_tile,
            )  # fmt: skip
            unit = scale * k_factor
            if CFG.ROUNDS:
                unit *= gl.convert_layout(factor, lane.type.layout)
            acc, row_max, row_sum, stage, phase = mainloop(
                q_rows, pipeline, stage, phase, tile, stop, row_mask, unit, cap, CFG, CONSUMER_WG
            )  # fmt: skip
            # If a row sees no key of this split, row_sum is 0: out becomes 0 and the LSE -inf, without 0/0.
            log_sum = gl.where(row_sum > 0, row_max + gl.log2(row_sum), float("-inf"))
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            cell = (begin + row) * (num_kv_heads * group) + head * group + head_in_group
            partial_row = ((split * 2 + partial_half) * num_kv_heads + head) * gl.num_programs(0) * CFG.BLOCK_M
            partial_row += packed + CONSUMER_WG * 64 + lane
            # The next request's rows of q load while this output is stored.
            prefix_len, begin, rows, tail_slots, queries = load_next_request(
                q, prefix_lens, q_indptr, request + 1, tiles_left_after > 0, q_len, tail_len, head, row_tiles, group,
                inv_group, stride_q_row, stride_q_head, CONSUMER_WG, CFG,
            )  # fmt: skip
            if CFG.SINKS:
                row_sum += sink_weight(sinks, head * group + head_in_group, row_live & is_unsplit, row_max)
            row_scale = v_factor / gl.where(row_sum > 0, row_sum, 1.0)
            acc = scale_acc(acc, row_scale)
            if is_unsplit:
                store_out(
                    wg_q_smem, acc, out, first_q_row, head_offset, count, head, group, inv_group, stride_out_row,
                    stride_out_head, CFG
                )  # fmt: skip
                if CFG.WITH_LSE:
                    gl.store(lse + cell, log_sum * 0.6931471805599453, mask=row_live)
            else:
                gl.store(partial_lse + partial_row, log_sum, mask=row_live)
                for part in gl.static_range(num_column_parts(CFG)):
                    store_partial_acc(
                        acc[part], partial_out, partial_row, row_live, head_offset, group, inv_group, part, CFG
                    )
        else:
            prefix_len, begin, rows, tail_slots, queries = load_next_request(
                q, prefix_lens, q_indptr, request + 1, tiles_left_after > 0, q_len, tail_len, head, row_tiles, group,
                inv_group, stride_q_row, stride_q_head, CONSUMER_WG, CFG,
            )  # fmt: skip
        partial_half = partial_half * 0 + 1
        tiles_left = tiles_left_after
        request += 1
        tile, _ = kv_tile_range(prefix_len, tail_slots, window_left, CFG)


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
def attend_decode_verify(
    q, k_source, v_source, k_extra, v_extra, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work,
    prefix_lens, q_indptr, page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words,
    window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE_SIZE: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_KIND: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr, OVERHEAD_TILES: gl.constexpr,
    PDL: gl.constexpr, STAGES: gl.constexpr, FP8_STAGES: gl.constexpr, UPCAST_FP8: gl.constexpr,
    INTRA_WG_OVERLAP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, KV_HEADS_PER_TILE: gl.constexpr,
    BLOCK_D_REST: gl.constexpr, STRIDE_ALIGN: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """Attend decode or verify rows; arguments as in `kernels.decode_verify.attend_decode_verify`, except these.

    Args:
        k_source, v_source: TMA descriptors of K and V ``[pages, P, heads, dim]``. With full-head boxes (a TMA box holds
            all 256 bytes of a head), their view is ``[pages, P / 8, 2 · heads, 8, dim / 2]``.
        k_extra, v_extra: second descriptors of K and V, or None. If a tile has two column parts, they load the second
            part. With full-head boxes they have a smaller box, for the last keys of a request that do not fill a box.
        KV_HEADS_PER_TILE: if 2, each two KV heads form one head with twice the dim and the query heads of both.
    """
    CFG: gl.constexpr = make_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_M=64 * NUM_CONSUMER_WGS, BLOCK_N=BLOCK_N, BOX_KEYS=BOX_KEYS, HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D, BLOCK_D_REST=BLOCK_D_REST, STAGES=STAGES, FP8_STAGES=FP8_STAGES, TAIL_KIND=TAIL_KIND,
        WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS, WITH_LSE=WITH_LSE,
        OVERHEAD_TILES=OVERHEAD_TILES, INTRA_WG_OVERLAP=INTRA_WG_OVERLAP, NUM_CONSUMER_WGS=NUM_CONSUMER_WGS,
        KV_HEADS_PER_TILE=KV_HEADS_PER_TILE, STRIDE_ALIGN=STRIDE_ALIGN, ROUNDS=ROUNDS,
    )  # fmt: skip
    q_smem = allocate_rows(q.dtype.element_ty, NUM_CONSUMER_WGS, 64, CFG)
    pipeline, load_pipeline = make_pipelines(
        q.dtype.element_ty, k_source.dtype, k_extra is not None and BLOCK_D_REST == 0, UPCAST_FP8, CFG
    )
    if PDL:
        # Everything above, such as initializing the barriers, overlaps the preceding grid (programmatic dependent
        # launch).
        grid_dependency_sync()
    if (q_len == 0) & (gl.program_id(0) == 0):
        zero_padding_rows(out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG)
    producer_args = (
        work, prefix_lens, q_indptr, page_table, (k_source, k_extra), (v_source, v_extra), load_pipeline, pipeline,
        q_len, tail_len, group, window_left, stride_table, num_pages,
    )  # fmt: skip
    consumer_args = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_smem, pipeline, q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row,
        stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    start_tma(
        consume_decode_verify, consumer_args, produce_decode_verify, producer_args, CFG, UPCAST_FP8, CONSUMER_REGISTERS
    )
