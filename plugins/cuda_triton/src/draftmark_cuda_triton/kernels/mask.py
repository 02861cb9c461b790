"""Visibility of keys for the packed rows of a row tile: tail kinds, tree masks and windows.

Keys [0, L) are the prefix, [L, L+T) the tail (the request's new tokens). Tiles that all rows see in full need no mask.
Only the last one or two tiles, which hold the tail, and the tiles at a window's start compute one.
"""

from typing import NamedTuple

import triton.language as tl

from .inline import INTERPRETED, bound, inline
from .reduce import largest

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
def visible_keys(tile, row_mask, C: tl.constexpr):
    """Return bool ``[BLOCK_M, BLOCK_N]``: True where a packed row sees a key of the tile."""
    position = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    slot = position - row_mask.prefix_len
    if C.TAIL_KIND == TREE:
        # Words of a row are shifted so that bit c of word i is key 32i + c of this tile. This needs registers for each
        # row instead of each (row, key). Words outside the mask read as zero; keys before slot 0 are prefix.
        first = tile * C.BLOCK_N - row_mask.prefix_len
        shift = (first & 31).to(tl.int64)
        column = tl.arange(0, C.BLOCK_N)
        bits = tl.full([row_mask.slot_of_row.shape[0], C.BLOCK_N], 0, tl.int32)
        for i in tl.static_range((C.BLOCK_N + 31) // 32):
            if INTERPRETED:
                # The interpreter needs dozens of operations for each mask word, so it skips words of 32 keys without a
                # tail token.
                if -32 < bound(first) + 32 * i < bound(row_mask.tail_len):
                    bits = insert_mask_word(bits, i, first, shift, column, row_mask)
            else:
                bits = insert_mask_word(bits, i, first, shift, column, row_mask)
        seen = (((bits >> (column % 32)[None, :]) & 1) != 0) & (slot < row_mask.tail_len)[None, :]
        seen = seen | (slot < 0)[None, :]
    elif C.TAIL_KIND == BLOCK:
        seen = (slot < row_mask.tail_len)[None, :] & (row_mask.slot_of_row == row_mask.slot_of_row)[:, None]
    else:
        seen = slot[None, :] <= row_mask.slot_of_row[:, None]
    if C.WINDOW:
        if C.TAIL_KIND == TREE:
            depth = tl.load(row_mask.depths + slot, mask=(slot >= 0) & (slot < row_mask.tail_len), other=0)
            key_position = tl.where(slot < 0, position, row_mask.prefix_len + depth)
        else:
            key_position = position
        seen = seen & (row_mask.row_position[:, None] - key_position[None, :] <= row_mask.window_left)
    return seen
