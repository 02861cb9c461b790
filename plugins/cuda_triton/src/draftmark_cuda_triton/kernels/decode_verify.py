"""Decode and verify, uniform or ragged: one launch attends to the prefix and the masked tail (a request's new tokens).

    grid (row tiles, KV heads, splits)    one split, one KV head, one row tile:
                                          ┌ request 3 ────────┐┌ request 4 ──────────────────┐┌ request 5 …
    all programs of a split read the      │ … tiles 100-127 T ││ tiles 0-127              T ││ tiles 0-63 │
    same tokens at the same time, so      └───── partial 0 ───┘└──────── straight to out ───┘└─ partial 1 ┘
    the prefix crosses the bus once.                      T: the last tile, where the tail's mask applies

Bytes: every key and value of a request once, (L + T) · heads_kv · dim · 2 · 2 for bf16. Rows and partial results are
small in comparison. Example: 64 requests x 8192 tokens, 8 KV heads of 128, bf16. 2.15 GB take 477 µs at 4.5 TB/s, for
one row or a tree of 16. With 64 rows or more (group 4), the tensor cores are the limit.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import bound, inline
from .latent import attend_range
from .mask import BLOCK, CAUSAL, TREE, RowMask
from .softmax import log_sum_exp, normalize, sink_weight
from .split_kv import kv_tile_range, kv_tile_stop, request_overhead, request_rows
from .tile import KvSource, load_scales, make_tiles


@inline
def zero_padding_rows(
    out,
    lse,
    begin,
    end,
    step,
    head,
    group,
    stride_out_row,
    stride_out_head,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Store zeros, and -inf in lse, in every step-th row of [begin, end), for the query heads of one KV head."""
    col = tl.arange(0, BLOCK_V)
    for row in range(bound(begin), bound(end), bound(step)):
        for head_in_group in range(bound(group * 0), bound(group)):
            at = out + (row * stride_out_row).to(tl.int64) + (head * group + head_in_group) * stride_out_head
            tl.store(at + col, tl.full([BLOCK_V], 0.0, out.dtype.element_ty), mask=col < VALUE_DIM)
            if WITH_LSE:
                tl.store(lse + (row * tl.num_programs(1) + head) * group + head_in_group, float("-inf"))


@triton.jit(
    do_not_specialize=[
        "q_len",
        "tail_len",
        "num_reqs",
        "num_rows",
        "stride_table",
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
    prefix_lens,
    q_indptr,
    page_table,
    tail_mask,
    tail_depth,
    q_len,
    tail_len,
    num_reqs,
    num_rows,
    group,
    mask_words,
    window_left,
    scale,
    cap,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
    stride_table,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LATENT: tl.constexpr,
    TAIL_KIND: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WITH_LSE: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend the rows of a split's requests. Store out and lse of unsplit requests, and partial results of the others.

    Args:
        q, out: ``[rows, heads, HEAD_DIM]`` and ``[rows, heads, VALUE_DIM]``.
        k_source, v_source: K and V; with LATENT the value part and the rest of the rows.
        lse: fp32 ``[rows, heads]``, natural log-sum-exp of the keys, without the sinks.
        sinks: fp32 ``[heads]``, natural units. `combine` adds them for requests in several splits.
        partial_out: fp32 ``[splits, 2, KV heads, row tiles · BLOCK_M, VALUE_DIM]``, each normalized by its own sum.
        partial_lse: fp32 ``[splits, 2, KV heads, row tiles · BLOCK_M]``, base 2. Index 0 of the second dimension holds
            the split's first request, index 1 its last one.
        work: splits from `tile_schedule.write_metadata_decode_verify`.
        BLOCK_D, BLOCK_V: columns of a K tile and of a V tile; with LATENT of the rest and of the value part.
    """
    if PDL:
        # Programmatic dependent launch: wait for the preceding grid, then let the next grid start. The order matters,
        # because `combine` reads the schedule before it waits for this grid.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    request = tl.load(work + split * 4)
    tile = tl.load(work + split * 4 + 1)
    tiles_left = tl.load(work + split * 4 + 2)
    if RAGGED and m == 0:
        # Padding rows after the last request get zeros instead of the previous content of the memory.
        zero_padding_rows(
            out, lse, tl.load(q_indptr + num_reqs) + split, num_rows, tl.num_programs(2), head, group, stride_out_row,
            stride_out_head, VALUE_DIM, BLOCK_V, WITH_LSE,
        )  # fmt: skip
    if tiles_left == 0:
        return

    packed = m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // group
    last_row = (m * BLOCK_M + BLOCK_M - 1) // group
    col = tl.arange(0, BLOCK_V)
    uniform_live = packed < q_len * group
    uniform_slot = tail_len - q_len + row
    uniform_cells = uniform_live[:, None] & (col < VALUE_DIM)[None, :]
    k_factor, v_factor = load_scales(k_scale, v_scale, SCALED)
    keys = KvSource(data=k_source, stride_page=stride_k_page, stride_slot=stride_k_slot, stride_head=stride_k_head)
    values = KvSource(data=v_source, stride_page=stride_v_page, stride_slot=stride_v_slot, stride_head=stride_v_head)
    C: tl.constexpr = make_tiles(
        PAGE_SIZE=PAGE_SIZE, BLOCK_N=BLOCK_N, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, VALUE_DIM=VALUE_DIM, BLOCK_V=BLOCK_V,
        TAIL_KIND=TAIL_KIND, WINDOW=WINDOW, CAP=CAP, USE_TMA=USE_TMA, STAGES=STAGES,
    )  # fmt: skip
    partial_half = 0
    while tiles_left > 0:
        prefix_len = tl.load(prefix_lens + request)
        begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len, RAGGED)
        if RAGGED:
            row_live = packed < rows * group
            slot_of_row = row
            cell_live = row_live[:, None] & (col < VALUE_DIM)[None, :]
            present = m * BLOCK_M < rows * group
        else:
            # These tensors are computed before the loop, because they do not change in it. Computing them inside would
            # cost large tiles registers.
            row_live, slot_of_row, cell_live, present = uniform_live, uniform_slot, uniform_cells, True
        first, end = kv_tile_range(prefix_len, tail_slots, window_left, BLOCK_N, WINDOW)
        # False if only the OVERHEAD_TILES of this request are left in the split, or if this row tile has no rows.
        if (tile < end) & present:
            stop = kv_tile_stop(
                tile, tiles_left, end, prefix_len, tail_slots, rows, last_row, BLOCK_N, TAIL_KIND == BLOCK
            )
            keys_seen_by_all = prefix_len
            if TAIL_KIND == CAUSAL:
                # Besides the prefix, every row of the tile sees the tail tokens up to that of the tile's first row.
                keys_seen_by_all = prefix_len + tail_slots - rows + m * BLOCK_M // group + 1
            if TAIL_KIND == BLOCK:
                keys_seen_by_all = prefix_len + tail_slots
            first_masked_tile = tl.minimum(tl.maximum(keys_seen_by_all // BLOCK_N, tile), stop)

            row_index = begin + row
            head_of_row = head * group + packed % group
            q_rows = row_index.to(tl.int64)[:, None] * stride_q_row + head_of_row[:, None] * stride_q_head
            depths = tail_depth + (begin if RAGGED else request * tail_len)
            row_position = prefix_len + slot_of_row
            if TAIL_KIND == TREE and WINDOW:
                row_position = prefix_len + tl.load(depths + slot_of_row, mask=row_live, other=0)
            row_words = tail_mask + row_index.to(tl.int64) * mask_words
            page_row = page_table + request.to(tl.int64) * stride_table
            row_mask = RowMask(
                prefix_len=prefix_len, tail_len=tail_slots, slot_of_row=slot_of_row, row_position=row_position,
                row_live=row_live, row_words=row_words, depths=depths, mask_words=mask_words, window_left=window_left,
            )  # fmt: skip
            acc, row_max, row_sum = attend_range(
                q + q_rows, row_live, tile, first_masked_tile, stop, keys, values, page_row, head, row_mask,
                scale, k_factor, cap, LATENT, C,
            )  # fmt: skip
            log_sum = log_sum_exp(row_max, row_sum)
            is_unsplit = (tile == first) & (tile + tiles_left >= end)
            if SINKS:
                row_sum += sink_weight(sinks, head_of_row, row_live & is_unsplit, row_max)
            acc = normalize(acc, row_sum, v_factor)
            if is_unsplit:
                out_rows = row_index.to(tl.int64)[:, None] * stride_out_row + head_of_row[:, None] * stride_out_head
                tl.store(out + out_rows + col[None, :], convert(acc, out.dtype.element_ty), mask=cell_live)
                if WITH_LSE:
                    cell = row_index * (num_kv_heads * group) + head_of_row
                    tl.store(lse + cell, log_sum * 0.6931471805599453, mask=row_live)
            else:
                partial_row = ((split * 2 + partial_half) * num_kv_heads + head) * tl.num_programs(0) * BLOCK_M + packed
                tl.store(partial_lse + partial_row, log_sum, mask=row_live)
                partial_cell = partial_row.to(tl.int64)[:, None] * VALUE_DIM + col[None, :]
                tl.store(partial_out + partial_cell, acc, mask=cell_live)
        partial_half = 1
        tiles_left -= end + request_overhead(tail_slots, OVERHEAD_TILES) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len, RAGGED)
            tile, _ = kv_tile_range(tl.load(prefix_lens + request), tail_slots, window_left, BLOCK_N, WINDOW)
