"""Prefill (EXTEND): ragged causal attention of prompts and chunks, prefix and new tokens in one pass.

    grid (row tiles · KV heads)       keys:  0 ────────── L ───────────── L+n
                                      tile:  │ seen by every row │ masked │ never loaded
    A program computes one row tile of one request: BLOCK_M packed rows (tokens x group heads). The longest tiles are
    launched first, and the heads of a tile next to each other, so that a request's KV stays in L2.

    If there are few row tiles, they can be split along their keys, as `split_kv` splits requests. Then no SM is idle
    while another SM reads a long prefix. The grid is then (splits · KV heads), and `combine` follows.

Operations: 4 · heads · dim · number of visible (row, key) pairs. Example: 8 requests x 4096 tokens, 32 query heads and
8 KV heads of 128. 1.1 TFLOP take 1.4 ms at 790 TFLOP/s. Reading q, K and V and writing out (0.7 GB) takes a tenth of
that.
"""

import triton
import triton.language as tl

from .convert import convert
from .latent import attend_range
from .mask import CAUSAL, RowMask
from .prefill_schedule import HEADER_WORDS
from .softmax import log_sum_exp, normalize, sink_weight
from .split_kv import row_tile_kv_range, split_order
from .tile import KvSource, load_scales, make_tiles

ALL_TILES = tl.constexpr(1 << 30)
"""Number of key tiles above that of any row tile: an unsplit row tile is processed to its end."""


@triton.jit(
    do_not_specialize=["num_kv_heads", "stride_table", "num_splits", "stride_lse_row"],
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
    q,
    k_source,
    v_source,
    k_scale,
    v_scale,
    sinks,
    out,
    lse,
    partial_out,
    partial_lse,
    work,
    row_tiles,
    prefix_lens,
    q_indptr,
    page_table,
    group,
    num_kv_heads,
    window_left,
    scale,
    cap,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    stride_table,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    num_splits,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_M_POW2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LATENT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend the rows of prompts and chunks to their prefixes and, causally, to the new tokens.

    Args:
        q, out: ``[rows, heads, HEAD_DIM]`` and ``[rows, heads, VALUE_DIM]``.
        k_source, v_source, BLOCK_D, BLOCK_V: as in `decode_verify.attend_decode_verify`.
        lse: fp32 ``[rows, heads]``, natural log-sum-exp of the keys, without the sinks.
        sinks: fp32 ``[heads]``, natural units.
        row_tiles, work: outputs of `prefill_schedule.write_metadata_prefill`; work with SPLIT_KV only.
        partial_out, partial_lse: with SPLIT_KV, as in `decode_verify.attend_decode_verify` with one row tile.
        BLOCK_M, BLOCK_M_POW2: packed rows of a row tile, and the next power of two.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, split = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    # The grid has one program for each (row tile, KV head), or for each (split, KV head).
    entry, tile, split_tiles_per_request = split, split * 0, split * 0
    count = tl.load(row_tiles + 1)
    tiles_left = tl.where(split < count, ALL_TILES, 0)
    if SPLIT_KV:
        split_tiles_per_request = tl.load(row_tiles + 3)
        split_record = work + tl.minimum(split, num_splits - 1) * 4
        entry = tl.where(split_tiles_per_request > 0, tl.load(split_record), split)
        tile = tl.load(split_record + 1)
        tiles_left = tl.where(
            split_tiles_per_request > 0, tl.where(split < num_splits, tl.load(split_record + 2), 0), tiles_left
        )
    col = tl.arange(0, BLOCK_V)
    k_factor, v_factor = load_scales(k_scale, v_scale, SCALED)
    keys = KvSource(data=k_source, stride_page=stride_k_page, stride_slot=stride_k_slot, stride_head=stride_k_head)
    values = KvSource(data=v_source, stride_page=stride_v_page, stride_slot=stride_v_slot, stride_head=stride_v_head)
    C: tl.constexpr = make_tiles(
        PAGE_SIZE=PAGE_SIZE, BLOCK_N=BLOCK_N, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, VALUE_DIM=VALUE_DIM, BLOCK_V=BLOCK_V,
        TAIL_KIND=CAUSAL, WINDOW=WINDOW, CAP=CAP, USE_TMA=USE_TMA, STAGES=STAGES,
    )  # fmt: skip
    partial_half = split * 0
    while tiles_left > 0:
        row_tile = row_tiles + HEADER_WORDS + split_order(entry, count, split_tiles_per_request) * 2
        request, m = tl.load(row_tile), tl.load(row_tile + 1)
        begin = tl.load(q_indptr + request)
        rows = tl.load(q_indptr + request + 1) - begin
        prefix_len = tl.load(prefix_lens + request)
        first, end = row_tile_kv_range(m, rows, prefix_len, group, window_left, BLOCK_M, BLOCK_N, WINDOW)
        if split_tiles_per_request == 0:
            tile = first
        stop = tl.minimum(tile + tiles_left, end)
        # False if only the OVERHEAD_TILES of this row tile are left in the split; other splits process its key tiles.
        if tile < end:
            lane = tl.arange(0, BLOCK_M_POW2)
            packed = m * BLOCK_M + lane
            row = packed // group
            row_live = row < rows
            if BLOCK_M_POW2 > BLOCK_M:
                row_live &= lane < BLOCK_M
            row_index = begin + row
            head_of_row = head * group + packed % group
            cell_live = row_live[:, None] & (col < VALUE_DIM)[None, :]
            q_rows = row_index.to(tl.int64)[:, None] * stride_q_row + head_of_row[:, None] * stride_q_head
            first_masked_tile = (prefix_len + m * BLOCK_M // group + 1) // BLOCK_N
            first_masked_tile = tl.minimum(tl.maximum(first_masked_tile, tile), stop)
            page_row = page_table + request.to(tl.int64) * stride_table
            # Prefill rows are a chain (plain causal), so the arguments for tree masks and depths are unused
            # placeholders.
            row_mask = RowMask(
                prefix_len=prefix_len, tail_len=rows, slot_of_row=row, row_position=prefix_len + row, row_live=row_live,
                row_words=row_tiles, depths=row_tiles, mask_words=0, window_left=window_left,
            )  # fmt: skip
            acc, row_max, row_sum = attend_range(
                q + q_rows, row_live, tile, first_masked_tile, stop, keys, values, page_row, head, row_mask,
                scale, k_factor, cap, LATENT, C,
            )  # fmt: skip
            log_sum = log_sum_exp(row_max, row_sum)
            is_unsplit = (tile == first) & (stop == end)
            row_weight = row_sum
            if SINKS:
                row_weight += sink_weight(sinks, head_of_row, row_live & is_unsplit, row_max)
            acc = normalize(acc, row_weight, v_factor)
            if is_unsplit:
                out_rows = row_index.to(tl.int64)[:, None] * stride_out_row + head_of_row[:, None] * stride_out_head
                tl.store(out + out_rows + col[None, :], convert(acc, out.dtype.element_ty), mask=cell_live)
                if WITH_LSE:
                    cell = row_index * stride_lse_row + head_of_row
                    tl.store(lse + cell, log_sum * 0.6931471805599453, mask=row_live)
            else:
                partial_row = ((split * 2 + partial_half) * num_kv_heads + head) * BLOCK_M + lane
                tl.store(partial_lse + partial_row, log_sum, mask=row_live)
                partial_cell = partial_row.to(tl.int64)[:, None] * VALUE_DIM + col[None, :]
                tl.store(partial_out + partial_cell, acc, mask=cell_live)
        partial_half = partial_half * 0 + 1
        entry += 1
        tiles_left = tl.where(split_tiles_per_request > 0, tiles_left - (end + OVERHEAD_TILES - tile), 0)
        if SPLIT_KV:  # noqa: SIM102
            if tiles_left > 0:
                row_tile = row_tiles + HEADER_WORDS + split_order(entry, count, split_tiles_per_request) * 2
                request = tl.load(row_tile)
                rows = tl.load(q_indptr + request + 1) - tl.load(q_indptr + request)
                tile, _ = row_tile_kv_range(
                    tl.load(row_tile + 1), rows, tl.load(prefix_lens + request), group, window_left, BLOCK_M, BLOCK_N,
                    WINDOW,
                )  # fmt: skip
