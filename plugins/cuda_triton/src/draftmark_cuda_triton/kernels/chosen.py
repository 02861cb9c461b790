"""Attention of rows with chosen keys: each query row has a list of KV slots, and attends to these keys only.

    grid (rows · head tiles, KV heads, splits)     one program: one row, BLOCK_M of its heads, one part of its list

    list of row 7:  │ 912  40  -1  3071 … │ 77  12 … │ … count          keys are gathered by slot, BLOCK_N at a time
                    └──── split 0 ────────┘└ split 1 ┘                  entries of -1 and after the count are not loaded

Rows of a request have lists of their own, so a tile holds the heads of one row. The parts of a list are equal, and
`combine` merges them. A latent row is loaded in two parts, as in `latent`. Bytes: a row's keys once for each head tile;
further head tiles of a row run next to the first one and read L2. Example: 64 requests x 1 row x 2048 keys, 128 heads,
rows of 512 + 64 elements. 151 MB take 34 µs at 4.4 TB/s, and 36 GFLOP take 46 µs at 790 TFLOP/s.
"""

import triton
import triton.language as tl

from .convert import convert
from .fp8_ds_mla import add_rows, empty_state, joined_state, load_row_queries, load_rows, row_logits
from .inline import INTERPRETED, bound, inline
from .latent import FP8_DS_MLA
from .softmax import add_tile, apply_soft_cap, log_sum_exp, normalize, sink_weight
from .tile import KvSource, dot, load_queries, load_scales


@inline
def load_chosen(
    source, slot, head, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Load the keys or values of slots ``[BLOCK_N]`` as ``[BLOCK_N, BLOCK_D]``; zeros where the slot is -1."""
    col = tl.arange(0, BLOCK_D)
    # 64-bit: slot · stride exceeds 2**31 from 3.7 million latent rows on (vllm#47671).
    rows = (slot // PAGE_SIZE).to(tl.int64) * source.stride_page + (slot % PAGE_SIZE) * source.stride_slot
    live = (slot >= 0)[:, None]
    if DIM != BLOCK_D:
        live = live & (col < DIM)[None, :]
    return tl.load(source.data + rows[:, None] + head * source.stride_head + col[None, :], mask=live, other=0.0)


@inline
def chosen_mainloop(
    q_first,
    q_rest,
    begin,
    end,
    keys,
    values,
    chosen,
    count,
    head,
    scale,
    cap,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LATENT: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend the heads of a row to tiles [begin, end) of its list; return acc, row_max, row_sum.

    Args:
        q_first, q_rest: queries of a latent row's value part and rest; otherwise q_first is the whole query.
        keys, values: K and V; with LATENT the value part and the rest of the rows.
        chosen: pointer to the row's list, with `count` entries.
    """
    acc = tl.full([q_first.shape[0], BLOCK_V], 0.0, tl.float32)
    row_max = tl.full([q_first.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.full([q_first.shape[0]], 0.0, tl.float32)
    unit = 1.4426950408889634 if CAP else scale
    entry = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    # Slots load one tile ahead, outside Triton's software pipeline (`tile.mainloop`).
    slot = tl.load(chosen + entry, mask=entry < count, other=-1)
    for tile in tl.range(bound(begin), bound(end), num_stages=STAGES):
        s = tl.full([q_first.shape[0], BLOCK_N], 0.0, tl.float32)
        if LATENT:
            value = load_chosen(keys, slot, head, PAGE_SIZE, VALUE_DIM, BLOCK_V)
            key = value
            if HEAD_DIM != VALUE_DIM:
                rest = load_chosen(values, slot, head, PAGE_SIZE, HEAD_DIM - VALUE_DIM, BLOCK_D)
                s = dot(q_rest, tl.trans(rest.to(q_first.dtype)), s)
        else:
            key = load_chosen(keys, slot, head, PAGE_SIZE, HEAD_DIM, BLOCK_D)
            value = load_chosen(values, slot, head, PAGE_SIZE, VALUE_DIM, BLOCK_V)
        listed = slot >= 0
        entry = (tile + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
        slot = tl.load(chosen + entry, mask=entry < count, other=-1)
        s = dot(q_first, tl.trans(key.to(q_first.dtype)), s)
        if CAP:
            s = apply_soft_cap(s, scale, cap, INTERPRETED or q_first.dtype == tl.float32)
        s = tl.where(listed[None, :], s, float("-inf"))
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, s, value, unit, q_first.dtype, True)
    return acc, row_max, row_sum


@inline
def chosen_fp8_ds_mla(
    queries, begin, end, rows, chosen, count, scale, cap, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAP: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Attend the heads of a row to tiles [begin, end) of its list of rows of 656 bytes, as `chosen_mainloop` does."""
    state = empty_state(queries[0].shape[0])
    unit = 1.4426950408889634 if CAP else scale
    dtype: tl.constexpr = queries[0].dtype
    entry = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(chosen + entry, mask=entry < count, other=-1)
    for tile in tl.range(bound(begin), bound(end), num_stages=STAGES):
        listed = slot >= 0
        # 64-bit: slot · 656 exceeds 2**31 from 3.2 million rows on (vllm#47671).
        offsets = (slot // PAGE_SIZE).to(tl.int64) * rows.stride_page + (slot % PAGE_SIZE) * rows.stride_slot
        loaded = load_rows(rows.data, offsets, listed, True)
        entry = (tile + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
        slot = tl.load(chosen + entry, mask=entry < count, other=-1)
        s = row_logits(queries, loaded)
        if CAP:
            s = apply_soft_cap(s, scale, cap, INTERPRETED)
        s = tl.where(listed[None, :], s, float("-inf"))
        state = add_rows(state, s, loaded, unit, dtype, True)
    return joined_state(state)


@triton.jit(
    do_not_specialize=["num_reqs", "group", "head_tiles"],
    do_not_specialize_on_alignment=["k_scale", "v_scale", "sinks", "lse", "chosen_slots", "chosen_counts", "q_indptr"],
)
def attend_chosen(
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
    chosen_slots,
    chosen_counts,
    q_indptr,
    num_reqs,
    width,
    group,
    head_tiles,
    scale,
    cap,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
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
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend every row to the keys of its list. Store out and lse, or partial results with SPLIT.

    Args:
        q, out, lse, sinks, k_source, v_source, BLOCK_D, BLOCK_V: as in `decode_verify.attend_decode_verify`.
        chosen_slots: int32 ``[rows, width]``; chosen_counts: int32 ``[rows]``. Rows from q_indptr[num_reqs] on have no
            keys: their lists are not read.
        partial_out: fp32 ``[rows, splits, KV heads, head_tiles · BLOCK_M, VALUE_DIM]``, each normalized by its own sum.
        partial_lse: fp32 ``[rows, splits, KV heads, head_tiles · BLOCK_M]``, base 2.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, m = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles
    head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    count = tl.load(chosen_counts + row, mask=row < tl.load(q_indptr + num_reqs), other=0)
    tiles = (count + BLOCK_N - 1) // BLOCK_N
    tiles_of_split = (tiles + num_splits - 1) // num_splits
    begin = split * tiles_of_split
    end = tl.minimum(begin + tiles_of_split, tiles)

    packed = m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = packed < group
    head_of_row = head * group + packed
    q_row = q + row.to(tl.int64) * stride_q_row + head_of_row[:, None] * stride_q_head
    k_factor, v_factor = load_scales(k_scale, v_scale, SCALED)
    keys = KvSource(data=k_source, stride_page=stride_k_page, stride_slot=stride_k_slot, stride_head=stride_k_head)
    values = KvSource(data=v_source, stride_page=stride_v_page, stride_slot=stride_v_slot, stride_head=stride_v_head)
    chosen = chosen_slots + row.to(tl.int64) * width
    if LATENT == FP8_DS_MLA:
        acc, row_max, row_sum = chosen_fp8_ds_mla(
            load_row_queries(q_row, live), begin, end, keys, chosen, count, scale, cap, PAGE_SIZE, BLOCK_N, CAP, STAGES
        )
    else:
        if LATENT:
            q_first = load_queries(q_row, live, 0, VALUE_DIM, BLOCK_V)
            q_rest = load_queries(q_row, live, VALUE_DIM, HEAD_DIM - VALUE_DIM, BLOCK_D)
        else:
            q_first = load_queries(q_row, live, 0, HEAD_DIM, BLOCK_D)
            q_rest = q_first
        acc, row_max, row_sum = chosen_mainloop(
            q_first, q_rest, begin, end, keys, values, chosen, count, head, scale * k_factor, cap, PAGE_SIZE, BLOCK_N,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, LATENT, CAP, STAGES,
        )  # fmt: skip

    log_sum = log_sum_exp(row_max, row_sum)
    if SINKS and not SPLIT:
        row_sum += sink_weight(sinks, head_of_row, live, row_max)
    acc = normalize(acc, row_sum, v_factor)
    col = tl.arange(0, BLOCK_V)
    cell_live = live[:, None] & (col < VALUE_DIM)[None, :]
    if SPLIT:
        partial_row = ((row * num_splits + split) * num_kv_heads + head) * head_tiles * BLOCK_M + packed
        tl.store(partial_lse + partial_row, log_sum, mask=live)
        partial_cell = partial_row.to(tl.int64)[:, None] * VALUE_DIM + col[None, :]
        tl.store(partial_out + partial_cell, acc, mask=cell_live)
    else:
        out_row = out + row.to(tl.int64) * stride_out_row + head_of_row[:, None] * stride_out_head
        tl.store(out_row + col[None, :], convert(acc, out.dtype.element_ty), mask=cell_live)
        if WITH_LSE:
            tl.store(lse + row * (num_kv_heads * group) + head_of_row, log_sum * 0.6931471805599453, mask=live)
