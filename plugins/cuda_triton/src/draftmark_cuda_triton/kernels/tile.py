"""Mainloop that all attention kernels in this folder share: one row tile against key tiles.

              BLOCK_N keys                     A row tile packs (query row j, head of the group): packed row
            ┌──────────────┐                   p = j·group + h'. All packed rows read the same KV head, so a key
    BLOCK_M │  s = q·kᵀ    │  ── softmax ──►   tile crosses the memory bus once for all rows and all heads of
    packed  │  [M, N] fp32 │     p·v           the group.
    rows    └──────────────┘

Keys [0, L) are the prefix, [L, L+T) the tail (the request's new tokens). Tiles that all rows see in full need no mask.
Only the last one or two tiles, which hold the tail, and the tiles at a window's start compute one.

Running state of a row tile, in base-2 units: acc [M, D] fp32; row_max [M], the largest scaled logit; row_sum [M].
"""

from typing import NamedTuple

import triton.language as tl

from .convert import convert
from .inline import INTERPRETED, bound, inline
from .reduce import largest, total

CAUSAL, TREE, BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""TAIL_KIND of a kernel: a row sees the tail up to its own token, the tokens in its tree mask, or the whole tail."""


class RowMask(NamedTuple):
    """Visibility of one request's keys for packed rows; int32 unless noted.

    Attributes:
        prefix_len, tail_len: numbers of keys in the prefix, and in the tail (the request's new tokens).
        slot_of_row: ``[BLOCK_M]``, index of each row in the tail.
        row_position: ``[BLOCK_M]``, position of each row's token in the sequence.
        row_live: bool ``[BLOCK_M]``, False for padding rows of the tile.
        row_words: trees only: pointers ``[BLOCK_M]`` to the packed mask of each row.
        depths: trees only: pointer to the depths of the tail's tokens.
        mask_words: trees only: int32 words of a row's mask.
        window_left: tokens before its own position that a row sees.
    """

    prefix_len: tl.tensor
    tail_len: tl.tensor
    slot_of_row: tl.tensor
    row_position: tl.tensor
    row_live: tl.tensor
    row_words: tl.tensor
    depths: tl.tensor
    mask_words: tl.tensor
    window_left: tl.tensor


class KvSource(NamedTuple):
    """K or V of a paged cache.

    Attributes:
        data: pointer to ``[pages, P, heads, dim]``, or a TMA descriptor of ``[slots, heads · dim]``.
        stride_page, stride_slot, stride_head: strides in elements.
    """

    data: tl.tensor
    stride_page: tl.tensor
    stride_slot: tl.tensor
    stride_head: tl.tensor


@inline
def dot(a, b, acc):
    """Return ``a · b + acc`` in fp32; b is converted to a's dtype."""
    b = b.to(a.dtype)
    if INTERPRETED:
        # The interpreter keeps bf16 as uint16 and would multiply the bit patterns.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@inline
def first_visible_key(row_mask, WINDOW: tl.constexpr):
    """Return the first key that any row of the request sees: every row is at position L (prefix_len) or later."""
    if WINDOW:
        return tl.maximum(row_mask.prefix_len - row_mask.window_left, 0)
    else:
        return 0


@inline
def first_tile_in_window(row_mask, begin, first_masked_tile, BLOCK_N: tl.constexpr):
    """Return the first tile of [begin, first_masked_tile] from which on every row's window holds all prefix keys.

    The window of the row with the largest position starts last.
    """
    highest = largest(tl.where(row_mask.row_live, row_mask.row_position, 0), 0)
    hidden = tl.maximum(highest - row_mask.window_left, 0)
    return tl.minimum(tl.maximum((hidden + BLOCK_N - 1) // BLOCK_N, begin), first_masked_tile)


@inline
def is_loaded(position, first_key, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return True for the keys that pointer loads read: before kv_len, and with a window from `first_key` on.

    Pages left of the window may belong to another request and contain NaN. If a tile lies in one page, that page also
    holds a visible key, so the request still owns it.
    """
    if WINDOW and PAGE_SIZE % BLOCK_N != 0:
        return (position >= first_key) & (position < kv_len)
    else:
        return position < kv_len


@inline
def load_page_ids(
    page_row, tile, first_key, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """Load the page ids of a tile's keys: one id if the tile lies in one page, ``[BLOCK_N]`` otherwise."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(page_row + tile * BLOCK_N // PAGE_SIZE)
    else:
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        loaded = is_loaded(position, first_key, kv_len, PAGE_SIZE, BLOCK_N, WINDOW)
        return tl.load(page_row + position // PAGE_SIZE, mask=loaded, other=0)


@inline
def load_tile(
    source,
    page,
    tile,
    head,
    first_key,
    kv_len,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Load a K or V tile ``[BLOCK_N, BLOCK_D]``.

    Keys that `is_loaded` excludes are zeros. With USE_TMA they are the contents of the page.
    """
    if USE_TMA:
        # The descriptor views the cache as [slots, heads · dim]. A tile lies in one page, so one TMA box is one tile.
        return source.data.load([page * PAGE_SIZE + tile * BLOCK_N % PAGE_SIZE, head * HEAD_DIM])
    else:
        col = tl.arange(0, BLOCK_D)
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # 64-bit: page · stride exceeds 2**31 in a large pool (vllm#47671).
        rows = page.to(tl.int64) * source.stride_page + (position % PAGE_SIZE) * source.stride_slot
        pointers = source.data + rows[:, None] + head * source.stride_head + col[None, :]
        live = is_loaded(position, first_key, kv_len, PAGE_SIZE, BLOCK_N, WINDOW)[:, None]
        if HEAD_DIM != BLOCK_D:
            live = live & (col < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=live, other=0.0)


@inline
def load_queries(rows, live, first, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load elements [first, first + DIM) of each packed row as ``[BLOCK_M, BLOCK_D]``; zeros where not `live`.

    Args:
        rows: pointers ``[BLOCK_M, 1]`` to the packed rows.
    """
    col = tl.arange(0, BLOCK_D)
    return tl.load(rows + first + col[None, :], mask=live[:, None] & (col < DIM)[None, :], other=0.0)


@inline
def apply_soft_cap(s, scale, cap, EXACT: tl.constexpr):
    """Return ``cap · tanh(s · scale / cap)`` in natural units; `scale` is the softmax scale in base-2 units.

    EXACT: compute tanh by exp2, which is exact at both ends. Otherwise use tanh.approx, with a relative error of at
    most 2**-11, as large as the error of rounding a softmax probability to 16 bits.
    """
    if EXACT:
        # tanh(x) = 1 - 2 / (exp(2x) + 1). `scale` contains the factor log2(e), which turns exp into exp2.
        e = tl.exp2(s * (scale * 2.0 / cap))
        return cap * (1.0 - 2.0 / (e + 1.0))
    else:
        x = s * (scale * 0.6931471805599453 / cap)
        return cap * tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@inline
def sink_weight(sinks, heads, live, row_max):
    """Return the term that each row's attention sink adds to its row sum, relative to `row_max`; 0 if not `live`.

    A sink has no value vector, so acc is unchanged. Sink logits are in natural units, after scale and cap.
    """
    sink = tl.load(sinks + heads, mask=live, other=float("-inf")) * 1.4426950408889634
    # If a row saw no key, row_max is -inf, and -inf - -inf would be NaN.
    return tl.exp2(sink - tl.where(row_max == float("-inf"), 0.0, row_max))


@inline
def insert_mask_word(bits, i: tl.constexpr, first, shift, column, row_mask):
    """Insert the mask bits of columns 32i to 32i + 31 into `bits`, shifted out of two adjacent mask words a row."""
    index = (first >> 5) + i + row_mask.slot_of_row * 0
    there = row_mask.row_live & (index >= 0) & (index < row_mask.mask_words)
    low = tl.load(row_mask.row_words + index, mask=there, other=0)
    there = row_mask.row_live & (index >= -1) & (index + 1 < row_mask.mask_words)
    high = tl.load(row_mask.row_words + index + 1, mask=there, other=0)
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    word = (both >> shift).to(tl.int32)
    return tl.where((column // 32 == i)[None, :], word[:, None], bits)


@inline
def visible_keys(tile, row_mask, BLOCK_N: tl.constexpr, TAIL_KIND: tl.constexpr, WINDOW: tl.constexpr):
    """Return bool ``[BLOCK_M, BLOCK_N]``: True where a packed row sees a key of the tile."""
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = position - row_mask.prefix_len
    if TAIL_KIND == TREE:
        # Words of a row are shifted so that bit c of word i is key 32i + c of this tile. This needs registers for each
        # row instead of each (row, key). Words outside the mask read as zero; keys before slot 0 are prefix.
        first = tile * BLOCK_N - row_mask.prefix_len
        shift = (first & 31).to(tl.int64)
        column = tl.arange(0, BLOCK_N)
        bits = tl.full([row_mask.slot_of_row.shape[0], BLOCK_N], 0, tl.int32)
        for i in tl.static_range((BLOCK_N + 31) // 32):
            if INTERPRETED:
                # The interpreter needs dozens of operations for each mask word, so it skips words of 32 keys without a
                # tail token.
                if -32 < bound(first) + 32 * i < bound(row_mask.tail_len):
                    bits = insert_mask_word(bits, i, first, shift, column, row_mask)
            else:
                bits = insert_mask_word(bits, i, first, shift, column, row_mask)
        seen = (((bits >> (column % 32)[None, :]) & 1) != 0) & (slot < row_mask.tail_len)[None, :]
        seen = seen | (slot < 0)[None, :]
    elif TAIL_KIND == BLOCK:
        seen = (slot < row_mask.tail_len)[None, :] & (row_mask.slot_of_row == row_mask.slot_of_row)[:, None]
    else:
        seen = slot[None, :] <= row_mask.slot_of_row[:, None]
    if WINDOW:
        if TAIL_KIND == TREE:
            depth = tl.load(row_mask.depths + slot, mask=(slot >= 0) & (slot < row_mask.tail_len), other=0)
            key_position = tl.where(slot < 0, position, row_mask.prefix_len + depth)
        else:
            key_position = position
        seen = seen & (row_mask.row_position[:, None] - key_position[None, :] <= row_mask.window_left)
    return seen


@inline
def add_tile(acc, row_max, row_sum, s, v, unit, dtype: tl.constexpr, MASKED: tl.constexpr):
    """Add a key tile to the running state of a row tile (online softmax); return acc, row_max, row_sum.

    Args:
        s: logits ``[BLOCK_M, BLOCK_N]`` fp32, -inf where a row does not see a key.
        v: values ``[BLOCK_N, BLOCK_V]``.
        unit: factor that makes the logits base-2 logits.
        dtype: dtype of the softmax probabilities in the product with `v`.
        MASKED: a row may have seen no key yet, in this tile and before.
    """
    new_row_max = tl.maximum(row_max, largest(s, 1) * unit)
    pivot = new_row_max
    if MASKED:
        # If a row has seen no key so far, its maximum is -inf, and -inf - -inf would be NaN.
        pivot = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    p = tl.exp2(s * unit - pivot[:, None])
    old_scale = tl.exp2(row_max - pivot)
    row_sum = row_sum * old_scale + total(p, 1)
    return dot(convert(p, dtype), v, acc * old_scale[:, None]), new_row_max, row_sum


@inline
def mainloop(
    state,
    q,
    begin,
    first_unmasked_tile,
    first_masked_tile,
    end,
    first_loaded_tile,
    last_tile,
    keys,
    values,
    page_row,
    head,
    row_mask,
    scale,
    cap,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAIL_KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Process key tiles [begin, end) and return the updated state of the row tile: acc, row_max, row_sum.

    Args:
        first_loaded_tile: tile for the first load of page ids: begin, or any valid tile if the range is empty.
        last_tile: last tile for which the prefetch is allowed to load page ids.
        MASK: 0: no tile is masked. 1: every tile is masked, and every tile is one TMA box. 2: tiles from
            `first_masked_tile` on are masked, and with a window also tiles before `first_unmasked_tile`.
    """
    acc, row_max, row_sum = state
    kv_len, first_key = row_mask.prefix_len + row_mask.tail_len, first_visible_key(row_mask, WINDOW)
    unit = 1.4426950408889634 if CAP else scale
    # Page ids load one tile ahead, outside Triton's software pipeline. Inside it they would use half of its stages.
    page = load_page_ids(page_row, first_loaded_tile, first_key, kv_len, PAGE_SIZE, BLOCK_N, WINDOW)
    for tile in tl.range(bound(begin), bound(end), num_stages=STAGES):
        k = load_tile(keys, page, tile, head, first_key, kv_len, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, USE_TMA, WINDOW)
        v = load_tile(
            values, page, tile, head, first_key, kv_len, PAGE_SIZE, BLOCK_N, VALUE_DIM, BLOCK_V, USE_TMA, WINDOW
        )
        page = load_page_ids(page_row, tl.minimum(tile + 1, last_tile), first_key, kv_len, PAGE_SIZE, BLOCK_N, WINDOW)
        if MASK == 1:
            # The mask is computed before the matrix product, so that its words load together with the keys.
            seen = visible_keys(tile, row_mask, BLOCK_N, TAIL_KIND, WINDOW)
        s = dot(q, tl.trans(k.to(q.dtype)), tl.full([q.shape[0], BLOCK_N], 0.0, tl.float32))
        if CAP:
            s = apply_soft_cap(s, scale, cap, INTERPRETED or q.dtype == tl.float32)
        if MASK == 2:
            differs = tile >= first_masked_tile
            if WINDOW:
                differs = differs | (tile < first_unmasked_tile)
            if differs:
                s = tl.where(visible_keys(tile, row_mask, BLOCK_N, TAIL_KIND, WINDOW), s, float("-inf"))
        if MASK == 1:
            s = tl.where(seen, s, float("-inf"))
            # A TMA box also loads what the page holds after kv_len, and 0 · NaN is NaN (vllm#43961).
            stored = tile * BLOCK_N + tl.arange(0, BLOCK_N) < kv_len
            v = tl.where(stored[:, None], v, 0.0).to(v.dtype)
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, s, v, unit, q.dtype, MASK != 0)
    return acc, row_max, row_sum


@inline
def attend_kv_range(
    q,
    begin,
    first_masked_tile,
    end,
    keys,
    values,
    page_row,
    head,
    row_mask,
    scale,
    cap,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAIL_KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend a row tile to key tiles [begin, end) and return its state: acc, row_max, row_sum.

    Rows can see different keys from tile `first_masked_tile` on, and at a window's start. Loads through pointers are
    masked and return zeros, so one loop serves all tiles. A TMA box loads everything that a page holds, so a separate
    loop processes the last tiles and zeroes V in registers. With TMA, tiles at a window's start have a separate loop
    too.
    """
    acc = tl.full([q.shape[0], BLOCK_V], 0.0, tl.float32)
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.full([q.shape[0]], 0.0, tl.float32)
    state = (acc, row_max, row_sum)
    first_unmasked_tile = begin
    if WINDOW:
        first_unmasked_tile = first_tile_in_window(row_mask, begin, first_masked_tile, BLOCK_N)
    if not USE_TMA:
        return mainloop(
            state, q, begin, first_unmasked_tile, first_masked_tile, end, begin, end - 1, keys, values, page_row, head,
            row_mask, scale, cap, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, TAIL_KIND, WINDOW, CAP,
            USE_TMA, 2, STAGES,
        )  # fmt: skip
    else:
        if WINDOW:
            state = mainloop(
                state, q, begin, first_unmasked_tile, first_masked_tile, first_unmasked_tile, begin, end - 1, keys,
                values, page_row, head, row_mask, scale, cap, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM,
                BLOCK_V, TAIL_KIND, WINDOW, CAP, USE_TMA, 1, 2,
            )  # fmt: skip
        state = mainloop(
            state, q, first_unmasked_tile, first_unmasked_tile, first_masked_tile, first_masked_tile,
            tl.minimum(first_unmasked_tile, end - 1), end - 1, keys, values, page_row, head, row_mask, scale, cap,
            PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, TAIL_KIND, WINDOW, CAP, USE_TMA, 0, STAGES,
        )  # fmt: skip
        return mainloop(
            state, q, first_masked_tile, first_unmasked_tile, first_masked_tile, end,
            tl.minimum(first_masked_tile, end - 1), end - 1, keys, values, page_row, head, row_mask, scale, cap,
            PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, TAIL_KIND, WINDOW, CAP, USE_TMA, 1, 2,
        )  # fmt: skip
