"""Mainloop over latent rows (MLA): a token has one row, its key is all of the row, its value the first elements.

               BLOCK_N keys                      A KV tile is loaded once, in two parts. The value part serves both
             ┌───────────────┐ value │ rest      products, so a tile crosses the memory bus and shared memory once:
    BLOCK_M  │ s = q·rowᵀ    │                       s   = q_value · valueᵀ + q_rest · restᵀ
    packed   │  [M, N] fp32  │                       out = softmax(s) · value
    rows     └───────────────┘

All query heads share the only KV head, so a row tile packs (query row, head) as in `tile`. The two parts lie in one
buffer or in two. Bytes: (L + T) · head_dim · 2 for 16 bit, once for all rows and heads. Example: 64 requests x 4096
tokens, rows of 512 + 64 elements. 302 MB take 69 µs at 4.4 TB/s. From 96 packed rows on, the products take longer.
"""

import triton.language as tl

from .fp8_ds_mla import add_rows, empty_state, joined_state, load_row_queries, load_rows, row_logits
from .inline import INTERPRETED, bound, inline
from .mainloop import attend_kv_range
from .mask import first_tile_in_window, first_visible_key, visible_keys
from .softmax import add_tile, apply_soft_cap
from .tile import dot, is_loaded, load_page_ids, load_queries

FP8_DS_MLA = tl.constexpr(2)
"""Value of LATENT for rows of 656 bytes. 1 stands for rows of one dtype, and 0 for K and V."""


@inline
def load_part(
    source,
    page,
    tile,
    first_key,
    kv_len,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load one part of a tile's rows, ``[BLOCK_N, BLOCK_D]``. Only masked tiles have keys that are not loaded."""
    col = tl.arange(0, BLOCK_D)
    position = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    # 64-bit: page · stride exceeds 2**31 in a large pool (vllm#47671).
    rows = page.to(tl.int64) * source.stride_page + (position % C.PAGE_SIZE) * source.stride_slot
    pointers = source.data + rows[:, None] + col[None, :]
    if MASKED:
        live = is_loaded(position, first_key, kv_len, C)[:, None]
        return tl.load(pointers, mask=live & (col < DIM)[None, :], other=0.0)
    elif DIM != BLOCK_D:
        return tl.load(pointers, mask=(col < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@inline
def latent_mainloop(
    state,
    q_value,
    q_rest,
    begin,
    end,
    last_tile,
    values,
    rests,
    page_row,
    row_mask,
    scale,
    cap,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Process key tiles [begin, end) and return the updated state of the row tile: acc, row_max, row_sum.

    Args:
        last_tile: last tile for which the prefetch is allowed to load page ids.
        values, rests: `tile.KvSource` of both parts of the rows.
        MASKED: rows can see different keys of these tiles, or not every key exists.
    """
    acc, row_max, row_sum = state
    kv_len, first_key = row_mask.prefix_len + row_mask.tail_len, first_visible_key(row_mask, C.WINDOW)
    unit = 1.4426950408889634 if C.CAP else scale
    # Page ids load one tile ahead, outside Triton's software pipeline (`tile.mainloop`).
    page = load_page_ids(page_row, tl.minimum(begin, last_tile), first_key, kv_len, C)
    for tile in tl.range(bound(begin), bound(end), num_stages=C.STAGES):
        value = load_part(values, page, tile, first_key, kv_len, C.VALUE_DIM, C.BLOCK_V, C, MASKED)
        s = tl.full([q_value.shape[0], C.BLOCK_N], 0.0, tl.float32)
        if C.HEAD_DIM != C.VALUE_DIM:
            rest = load_part(rests, page, tile, first_key, kv_len, C.HEAD_DIM - C.VALUE_DIM, C.BLOCK_D, C, MASKED)
            s = dot(q_rest, tl.trans(rest.to(q_rest.dtype)), s)
        page = load_page_ids(page_row, tl.minimum(tile + 1, last_tile), first_key, kv_len, C)
        s = dot(q_value, tl.trans(value.to(q_value.dtype)), s)
        if C.CAP:
            s = apply_soft_cap(s, scale, cap, INTERPRETED or q_value.dtype == tl.float32)
        if MASKED:
            s = tl.where(visible_keys(tile, row_mask, C), s, float("-inf"))
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, s, value, unit, q_value.dtype, MASKED)
    return acc, row_max, row_sum


@inline
def fp8_ds_mla_mainloop(
    state, queries, begin, end, last_tile, rows, page_row, row_mask, scale, cap, C: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Process key tiles [begin, end) of rows of 656 bytes; `state` and `queries` as in `fp8_ds_mla`."""
    kv_len, first_key = row_mask.prefix_len + row_mask.tail_len, first_visible_key(row_mask, C.WINDOW)
    unit = 1.4426950408889634 if C.CAP else scale
    dtype: tl.constexpr = queries[0].dtype
    # Page ids load one tile ahead, outside Triton's software pipeline (`tile.mainloop`).
    page = load_page_ids(page_row, tl.minimum(begin, last_tile), first_key, kv_len, C)
    for tile in tl.range(bound(begin), bound(end), num_stages=C.STAGES):
        position = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        # 64-bit: page · stride exceeds 2**31 in a large pool (vllm#47671).
        offsets = page.to(tl.int64) * rows.stride_page + (position % C.PAGE_SIZE) * rows.stride_slot
        loaded = load_rows(rows.data, offsets, is_loaded(position, first_key, kv_len, C), MASKED)
        page = load_page_ids(page_row, tl.minimum(tile + 1, last_tile), first_key, kv_len, C)
        s = row_logits(queries, loaded)
        if C.CAP:
            s = apply_soft_cap(s, scale, cap, INTERPRETED)
        if MASKED:
            s = tl.where(visible_keys(tile, row_mask, C), s, float("-inf"))
        state = add_rows(state, s, loaded, unit, dtype, MASKED)
    return state


@inline
def attend_fp8_ds_mla_range(
    queries, begin, first_masked_tile, end, rows, page_row, row_mask, scale, cap, C: tl.constexpr
):  # fmt: skip
    """Attend a row tile to key tiles [begin, end) of rows of 656 bytes, in loops as in `attend_latent_range`."""
    state = empty_state(queries[0].shape[0])
    first_unmasked_tile = begin
    if C.WINDOW:
        first_unmasked_tile = first_tile_in_window(row_mask, begin, first_masked_tile, C.BLOCK_N)
        state = fp8_ds_mla_mainloop(
            state, queries, begin, first_unmasked_tile, end - 1, rows, page_row, row_mask, scale, cap, C, True
        )
    state = fp8_ds_mla_mainloop(
        state, queries, first_unmasked_tile, first_masked_tile, end - 1, rows, page_row, row_mask, scale, cap, C, False
    )
    state = fp8_ds_mla_mainloop(
        state, queries, first_masked_tile, end, end - 1, rows, page_row, row_mask, scale, cap, C, True
    )
    return joined_state(state)


@inline
def attend_latent_range(
    q_value,
    q_rest,
    begin,
    first_masked_tile,
    end,
    values,
    rests,
    page_row,
    row_mask,
    scale,
    cap,
    C: tl.constexpr,
):
    """Attend a row tile to key tiles [begin, end) and return its state: acc, row_max, row_sum.

    Rows can see different keys from tile `first_masked_tile` on, and at a window's start. Those tiles have loops of
    their own, so the loop over the other tiles computes no mask.
    """
    acc = tl.full([q_value.shape[0], C.BLOCK_V], 0.0, tl.float32)
    row_max = tl.full([q_value.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.full([q_value.shape[0]], 0.0, tl.float32)
    state = (acc, row_max, row_sum)
    first_unmasked_tile = begin
    if C.WINDOW:
        first_unmasked_tile = first_tile_in_window(row_mask, begin, first_masked_tile, C.BLOCK_N)
        state = latent_mainloop(
            state, q_value, q_rest, begin, first_unmasked_tile, end - 1, values, rests, page_row, row_mask, scale, cap,
            C, True,
        )  # fmt: skip
    state = latent_mainloop(
        state, q_value, q_rest, first_unmasked_tile, first_masked_tile, end - 1, values, rests, page_row, row_mask,
        scale, cap, C, False,
    )  # fmt: skip
    return latent_mainloop(
        state, q_value, q_rest, first_masked_tile, end, end - 1, values, rests, page_row, row_mask, scale, cap, C, True
    )


@inline
def attend_range(
    q_rows, row_live, begin, first_masked_tile, end, keys, values, page_row, head, row_mask, scale,
    k_factor, cap, LATENT: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Load the queries of a row tile and attend to key tiles [begin, end), of latent rows or of K and V.

    Args:
        q_rows: pointers ``[BLOCK_M, 1]`` to the packed rows.
        k_factor: scale of K.
        keys, values: K and V; with LATENT the value part and the rest of the rows.
    """
    if LATENT == FP8_DS_MLA:
        return attend_fp8_ds_mla_range(
            load_row_queries(q_rows, row_live), begin, first_masked_tile, end, keys, page_row, row_mask,
            scale * k_factor, cap, C,
        )  # fmt: skip
    elif LATENT:
        return attend_latent_range(
            load_queries(q_rows, row_live, 0, C.VALUE_DIM, C.BLOCK_V),
            load_queries(q_rows, row_live, C.VALUE_DIM, C.HEAD_DIM - C.VALUE_DIM, C.BLOCK_D), begin,
            first_masked_tile, end, keys, values, page_row, row_mask, scale * k_factor, cap, C,
        )  # fmt: skip
    else:
        return attend_kv_range(
            load_queries(q_rows, row_live, 0, C.HEAD_DIM, C.BLOCK_D), begin, first_masked_tile, end, keys, values,
            page_row, head, row_mask, scale * k_factor, cap, C,
        )  # fmt: skip
