"""Mainloop that the kernels of decode, verify and prefill share: one row tile against key tiles.

          BLOCK_N keys                     A row tile packs (query row j, head of the group): packed row
        ┌──────────────┐                   p = j·group + h'. All packed rows read the same KV head, so a key
BLOCK_M │  s = q·kᵀ    │  ── softmax ──►   tile crosses the memory bus once for all rows and all heads of
packed  │  [M, N] fp32 │     p·v           the group.
rows    └──────────────┘
"""

from typing import NamedTuple

import triton.language as tl

from .inline import INTERPRETED, bound, inline
from .mask import first_tile_in_window, first_visible_key, visible_keys
from .softmax import add_tile, apply_soft_cap
from .tile import dot, load_page_ids, load_tile


class TileRange(NamedTuple):
    """Key tiles of one loop, int32.

    Attributes:
        begin, end: the loop processes tiles [begin, end).
        first_unmasked: tiles before it can be hidden by a window.
        first_masked: rows can see different keys from this tile on.
    """

    begin: tl.tensor
    end: tl.tensor
    first_unmasked: tl.tensor
    first_masked: tl.tensor


@inline
def mainloop(
    state,
    q,
    tiles,
    first_loaded_tile,
    last_tile,
    keys,
    values,
    page_row,
    head,
    row_mask,
    scale,
    cap,
    C: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Process key tiles and return the updated state of the row tile: acc, row_max, row_sum.

    Args:
        tiles: `TileRange`.
        first_loaded_tile: tile for the first load of page ids: begin, or any valid tile if the range is empty.
        last_tile: last tile for which the prefetch is allowed to load page ids.
        MASK: 0: no tile is masked. 1: every tile is masked, and every tile is one TMA box. 2: tiles from
            `tiles.first_masked` on are masked, and with a window also tiles before `tiles.first_unmasked`.
        STAGES: key tiles in flight.
    """
    acc, row_max, row_sum = state
    kv_len, first_key = row_mask.prefix_len + row_mask.tail_len, first_visible_key(row_mask, C.WINDOW)
    unit = 1.4426950408889634 if C.CAP else scale
    # Page ids load one tile ahead, outside Triton's software pipeline. Inside it they would use half of its stages.
    page = load_page_ids(page_row, first_loaded_tile, first_key, kv_len, C)
    for tile in tl.range(bound(tiles.begin), bound(tiles.end), num_stages=STAGES):
        k = load_tile(keys, page, tile, head, first_key, kv_len, C.HEAD_DIM, C.BLOCK_D, C)
        v = load_tile(values, page, tile, head, first_key, kv_len, C.VALUE_DIM, C.BLOCK_V, C)
        page = load_page_ids(page_row, tl.minimum(tile + 1, last_tile), first_key, kv_len, C)
        if MASK == 1:
            # The mask is computed before the matrix product, so that its words load together with the keys.
            seen = visible_keys(tile, row_mask, C)
        s = dot(q, tl.trans(k.to(q.dtype)), tl.full([q.shape[0], C.BLOCK_N], 0.0, tl.float32))
        if C.CAP:
            s = apply_soft_cap(s, scale, cap, INTERPRETED or q.dtype == tl.float32)
        if MASK == 2:
            differs = tile >= tiles.first_masked
            if C.WINDOW:
                differs = differs | (tile < tiles.first_unmasked)
            if differs:
                s = tl.where(visible_keys(tile, row_mask, C), s, float("-inf"))
        if MASK == 1:
            s = tl.where(seen, s, float("-inf"))
            # A TMA box also loads what the page holds after kv_len, and 0 · NaN is NaN (vllm#43961).
            stored = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N) < kv_len
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
    C: tl.constexpr,
):
    """Attend a row tile to key tiles [begin, end) and return its state: acc, row_max, row_sum.

    Rows can see different keys from tile `first_masked_tile` on, and at a window's start. Loads through pointers are
    masked and return zeros, so one loop serves all tiles. A TMA box loads everything that a page holds, so a separate
    loop processes the last tiles and zeroes V in registers. With TMA, tiles at a window's start have a separate loop
    too.
    """
    acc = tl.full([q.shape[0], C.BLOCK_V], 0.0, tl.float32)
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.full([q.shape[0]], 0.0, tl.float32)
    state = (acc, row_max, row_sum)
    first_unmasked_tile = begin
    if C.WINDOW:
        first_unmasked_tile = first_tile_in_window(row_mask, begin, first_masked_tile, C.BLOCK_N)
    if not C.USE_TMA:
        tiles = TileRange(begin=begin, end=end, first_unmasked=first_unmasked_tile, first_masked=first_masked_tile)
        return mainloop(
            state, q, tiles, begin, end - 1, keys, values, page_row, head, row_mask, scale, cap, C, 2, C.STAGES
        )
    else:
        if C.WINDOW:
            tiles = TileRange(
                begin=begin, end=first_unmasked_tile, first_unmasked=first_unmasked_tile, first_masked=first_masked_tile
            )
            state = mainloop(
                state, q, tiles, begin, end - 1, keys, values, page_row, head, row_mask, scale, cap, C, 1, 2
            )
        tiles = TileRange(
            begin=first_unmasked_tile, end=first_masked_tile, first_unmasked=first_unmasked_tile,
            first_masked=first_masked_tile,
        )  # fmt: skip
        state = mainloop(
            state, q, tiles, tl.minimum(first_unmasked_tile, end - 1), end - 1, keys, values, page_row, head, row_mask,
            scale, cap, C, 0, C.STAGES,
        )  # fmt: skip
        tiles = TileRange(
            begin=first_masked_tile, end=end, first_unmasked=first_unmasked_tile, first_masked=first_masked_tile
        )
        return mainloop(
            state, q, tiles, tl.minimum(first_masked_tile, end - 1), end - 1, keys, values, page_row, head, row_mask,
            scale, cap, C, 1, 2,
        )  # fmt: skip
