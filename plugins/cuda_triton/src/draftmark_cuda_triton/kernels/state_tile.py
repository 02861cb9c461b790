"""Tiles of a head's state, and sums over them."""

import triton.language as tl

from .inline import inline
from .reduce import total


@inline
def tile_of(
    first_v,
    VALUE_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return value elements ``[BLOCK_V]``, key elements ``[CHUNKS, 1, CHUNK]``, the tile's offsets, and what exists."""
    value = first_v + tl.arange(0, BLOCK_V)
    key = tl.arange(0, CHUNKS)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    offsets = value[None, :, None] * KEY_DIM + key
    return value, key, offsets, (value < VALUE_DIM)[None, :, None] & (key < KEY_DIM)


@inline
def sum_over_keys(tile):
    """Return the sum ``[BLOCK_V]`` over the keys of a tile ``[CHUNKS, BLOCK_V, CHUNK]``."""
    return total(total(tile, 2), 0)
