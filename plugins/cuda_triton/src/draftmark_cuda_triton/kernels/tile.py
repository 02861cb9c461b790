"""The inner step that every attention kernel here shares: one tile of keys against one tile of packed rows.

              BLOCK_N keys                     A row tile packs (query row j, head of the group): packed row
            ┌──────────────┐                   p = j·group + h'. All of them read the same KV head, so a tile
    BLOCK_M │  s = q·kᵀ    │  ── softmax ──►   of keys crosses the memory bus once for all rows and all heads
    packed  │  [M, N] fp32 │     p·v           of the group.
    rows    └──────────────┘

Keys [0, L) are the prefix, [L, L+T) the tail. A tile that lies in what all rows see needs no mask; only the
last one or two tiles, where the tail is, pay for one (`MASKED`).

Running state of a row tile, base 2: acc [M, D] fp32, top [M] the largest scaled logit, mass [M] the sum.
"""

import triton.language as tl

from .convert import convert
from .inline import INTERPRETED, bound, inline
from .reduce import largest, total

CAUSAL, TREE, BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""TAIL of a kernel: a row sees the tail up to its own slot, what its mask names, or all of it."""


@inline
def dot(a, b, acc):
    """``a · b + acc`` in fp32; b is brought to a's dtype."""
    b = b.to(a.dtype)
    if INTERPRETED:
        # The interpreter keeps bf16 as uint16 and would multiply the bit patterns.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@inline
def pages_of(page_row, tile, kv_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a tile's keys: one id when a tile lies in one page, ``[BLOCK_N]`` otherwise."""
    if PAGE % BLOCK_N == 0:
        return tl.load(page_row + tile * BLOCK_N // PAGE)
    else:
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(page_row + position // PAGE, mask=position < kv_len, other=0)


@inline
def load_keys(
    source,
    page,
    tile,
    head,
    kv_len,
    stride_page,
    stride_slot,
    stride_head,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """K or V of one tile through pointers, ``[BLOCK_N, BLOCK_D]``; zeros at and above kv_len."""
    col = tl.arange(0, BLOCK_D)
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # 64-bit: page · stride passes 2**31 in a large pool (vllm#47671).
    rows = page.to(tl.int64) * stride_page + (position % PAGE) * stride_slot
    pointers = source + rows[:, None] + head * stride_head + col[None, :]
    live = (position < kv_len)[:, None]
    if HEAD_DIM != BLOCK_D:
        live = live & (col < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=live, other=0.0)


@inline
def soft_cap(s, scale, cap):
    """``cap · tanh(s · scale / cap)`` in base-2 units; tanh through exp2, exact at both ends."""
    e = tl.exp2(s * (scale * 2.0 / cap))
    # log2(e) · cap · (1 - 2 / (exp(2x) + 1)); `scale` already carries log2(e), which turns exp into exp2.
    return cap * (1.0 - 2.0 / (e + 1.0))


@inline
def sink_mass(sinks, heads, live, top):
    """What the sinks of query heads add to the mass of rows, beside their `top`; nothing where not `live`.

    A sink has no value, so acc stays. It is in natural units, and already what a logit is after scale and cap.
    """
    sink = tl.load(sinks + heads, mask=live, other=float("-inf")) * 1.4426950408889634
    # A row that has seen no key: -inf - -inf would be NaN.
    return tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))


@inline
def with_word(bits, i: tl.constexpr, first, shift, column, slot_of_row, row_live, row_words, mask_words):
    """`bits` with the 32 keys from 32i of a tile filled in: of each row, two neighbouring words shifted into one."""
    index = (first >> 5) + i + slot_of_row * 0
    low = tl.load(row_words + index, mask=row_live & (index >= 0) & (index < mask_words), other=0)
    high = tl.load(row_words + index + 1, mask=row_live & (index >= -1) & (index + 1 < mask_words), other=0)
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    word = (both >> shift).to(tl.int32)
    return tl.where((column // 32 == i)[None, :], word[:, None], bits)


@inline
def visible(
    tile,
    prefix_len,
    tail_len,
    slot_of_row,
    row_position,
    row_live,
    row_words,
    depths,
    mask_words,
    window_left,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """bool ``[BLOCK_M, BLOCK_N]``: which keys of a tile each packed row sees."""
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = position - prefix_len
    if TAIL == TREE:
        # A row's words are shifted so that bit c of word i is key 32i + c of this tile: registers per row, not per
        # (row, key). Words that do not exist read as zero, and keys left of slot 0 are prefix.
        first = tile * BLOCK_N - prefix_len
        shift = (first & 31).to(tl.int64)
        column = tl.arange(0, BLOCK_N)
        bits = tl.full([slot_of_row.shape[0], BLOCK_N], 0, tl.int32)
        for i in tl.static_range((BLOCK_N + 31) // 32):
            if INTERPRETED:
                # A word is dozens of operations there, so 32 keys among which no tail slot is are left out.
                if -32 < bound(first) + 32 * i < bound(tail_len):
                    bits = with_word(bits, i, first, shift, column, slot_of_row, row_live, row_words, mask_words)
            else:
                bits = with_word(bits, i, first, shift, column, slot_of_row, row_live, row_words, mask_words)
        seen = (((bits >> (column % 32)[None, :]) & 1) != 0) & (slot < tail_len)[None, :]
        seen = seen | (slot < 0)[None, :]
    elif TAIL == BLOCK:
        seen = (slot < tail_len)[None, :] & (slot_of_row == slot_of_row)[:, None]
    else:
        seen = slot[None, :] <= slot_of_row[:, None]
    if WINDOW:
        if TAIL == TREE:
            depth = tl.load(depths + slot, mask=(slot >= 0) & (slot < tail_len), other=0)
            key_position = tl.where(slot < 0, position, prefix_len + depth)
        else:
            key_position = position
        seen = seen & (row_position[:, None] - key_position[None, :] <= window_left)
    return seen


@inline
def attend_tiles(
    acc,
    top,
    mass,
    q,
    begin,
    clear,
    end,
    fetch,
    last,
    k_source,
    v_source,
    page_row,
    head,
    prefix_len,
    tail_len,
    slot_of_row,
    row_position,
    row_live,
    row_words,
    depths,
    mask_words,
    window_left,
    scale,
    cap,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold tiles [begin, end) into the running state of one row tile.

    MASK says where rows differ in what they see: in no tile (0), in all (1), or from tile `clear` on (2).
    `fetch` is begin, or any tile if there is none to fold; `last` bounds the look-ahead.
    """
    kv_len = prefix_len + tail_len
    unit = 1.4426950408889634 if CAP else scale
    # Page ids are fetched a tile ahead, outside the pipeline: inside it they would take half of its stages.
    page = pages_of(page_row, fetch, kv_len, PAGE, BLOCK_N)
    for tile in tl.range(bound(begin), bound(end), num_stages=STAGES):
        if USE_TMA:
            # The cache is described as [slots, heads · dim]: a tile lies in one page, so one box is one tile.
            slot = page * PAGE + tile * BLOCK_N % PAGE
            k = k_source.load([slot, head * HEAD_DIM])
            v = v_source.load([slot, head * HEAD_DIM])
        else:
            k = load_keys(
                k_source, page, tile, head, kv_len, stride_k_page, stride_k_slot, stride_k_head,
                PAGE, BLOCK_N, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            v = load_keys(
                v_source, page, tile, head, kv_len, stride_v_page, stride_v_slot, stride_v_head,
                PAGE, BLOCK_N, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        page = pages_of(page_row, tl.minimum(tile + 1, last), kv_len, PAGE, BLOCK_N)
        if MASK == 1:
            # Before the product, so that the mask's words travel while the keys do.
            seen = visible(
                tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths,
                mask_words, window_left, BLOCK_N, TAIL, WINDOW,
            )  # fmt: skip
        s = dot(q, tl.trans(k.to(q.dtype)), tl.full([q.shape[0], BLOCK_N], 0.0, tl.float32))
        if CAP:
            s = soft_cap(s, scale, cap)
        if MASK == 2:  # noqa: SIM102  one is decided by the compiler, the other on the device
            if tile >= clear:
                seen = visible(
                    tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths,
                    mask_words, window_left, BLOCK_N, TAIL, WINDOW,
                )  # fmt: skip
                s = tl.where(seen, s, float("-inf"))
        if MASK == 1:
            s = tl.where(seen, s, float("-inf"))
            if USE_TMA:
                # A box brings what the page holds past kv_len, and 0 · NaN is NaN (vllm#43961).
                stored = tile * BLOCK_N + tl.arange(0, BLOCK_N) < kv_len
                v = tl.where(stored[:, None], v, 0.0).to(v.dtype)
        new_top = tl.maximum(top, largest(s, 1) * unit)
        pivot = new_top
        if MASK != 0:
            # A row that has seen no key yet: -inf - -inf would be NaN.
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s * unit - pivot[:, None])
        shrink = tl.exp2(top - pivot)
        mass = mass * shrink + total(p, 1)
        acc = dot(convert(p, q.dtype), v, acc * shrink[:, None])
        top = new_top
    return acc, top, mass


@inline
def attend_range(
    acc,
    top,
    mass,
    q,
    begin,
    clear,
    end,
    k_source,
    v_source,
    page_row,
    head,
    prefix_len,
    tail_len,
    slot_of_row,
    row_position,
    row_live,
    row_words,
    depths,
    mask_words,
    window_left,
    scale,
    cap,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold tiles [begin, end); rows differ in what they see from tile `clear` on, or everywhere with a window.

    Through pointers one loop does both, for a masked load brings zeros. A box brings all that a page holds, so
    its last tiles have a loop of their own, which zeroes V in registers.
    """
    if WINDOW:
        return attend_tiles(
            acc, top, mass, q, begin, begin, end, begin, end - 1, k_source, v_source, page_row, head, prefix_len,
            tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left, scale, cap,
            stride_k_page, stride_k_slot, stride_k_head, stride_v_page, stride_v_slot, stride_v_head, PAGE, BLOCK_N,
            HEAD_DIM, BLOCK_D, TAIL, WINDOW, CAP, USE_TMA, 1, STAGES,
        )  # fmt: skip
    elif not USE_TMA:
        return attend_tiles(
            acc, top, mass, q, begin, clear, end, begin, end - 1, k_source, v_source, page_row, head, prefix_len,
            tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left, scale, cap,
            stride_k_page, stride_k_slot, stride_k_head, stride_v_page, stride_v_slot, stride_v_head, PAGE, BLOCK_N,
            HEAD_DIM, BLOCK_D, TAIL, WINDOW, CAP, USE_TMA, 2, STAGES,
        )  # fmt: skip
    else:
        acc, top, mass = attend_tiles(
            acc, top, mass, q, begin, clear, clear, begin, end - 1, k_source, v_source, page_row, head, prefix_len,
            tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left, scale, cap,
            stride_k_page, stride_k_slot, stride_k_head, stride_v_page, stride_v_slot, stride_v_head, PAGE, BLOCK_N,
            HEAD_DIM, BLOCK_D, TAIL, WINDOW, CAP, USE_TMA, 0, STAGES,
        )  # fmt: skip
        return attend_tiles(
            acc, top, mass, q, clear, clear, end, tl.minimum(clear, end - 1), end - 1, k_source, v_source, page_row,
            head, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words,
            window_left, scale, cap, stride_k_page, stride_k_slot, stride_k_head, stride_v_page, stride_v_slot,
            stride_v_head, PAGE, BLOCK_N, HEAD_DIM, BLOCK_D, TAIL, WINDOW, CAP, USE_TMA, 1, 2,
        )  # fmt: skip
