"""Configurations for the interpreter on CPU tensors: larger tiles, few splits."""

from __future__ import annotations

from dataclasses import replace

from draftmark import AttentionShape

from .common import MIN_BLOCK_M, KernelConfig, next_power_of_two, row_tiles
from .split_kv import partial_rows

INTERPRETED_KEYS = 256
"""Keys of a tile in the interpreter at most, where an operation costs about the same for 64 keys and for 256."""
INTERPRETED_ROWS = 256
"""Packed rows of a row tile in the interpreter at most: however few they are, a program costs milliseconds."""
INTERPRETED_SPLITS = 2
"""Pieces in the interpreter where a request has several tiles: two still cut and merge."""


def interpreted_config(
    shape: AttentionShape, config: KernelConfig, q_len: int, num_splits: int, max_kv_len: int
) -> tuple[KernelConfig, int]:
    """The same work for the interpreter, where a program costs milliseconds: more keys and rows a tile, few pieces.

    Row tiles are joined as far as partial results then fit where those of all pieces did. Two pieces still cut and
    merge; one does where no request has two tiles, since nothing would be cut.
    """
    block_n = _keys_in_page(shape, config) or _keys_across_pages(max_kv_len)
    joined = replace(config, block_m=min(config.block_m, 128), block_n=block_n, kv_heads_per_tile=1)
    few_rows = 1 if max_kv_len <= joined.block_n else min(num_splits, INTERPRETED_SPLITS)
    room = partial_rows(shape, config, num_splits, q_len)
    while row_tiles(joined, q_len, shape.group_size) > 1 and joined.block_m < INTERPRETED_ROWS:
        larger = replace(joined, block_m=2 * joined.block_m)
        if partial_rows(shape, larger, few_rows, q_len) > room:
            break
        joined = larger
    return joined, few_rows


def interpreted_prefill_config(
    shape: AttentionShape, config: KernelConfig, max_kv_len: int, num_splits: int
) -> tuple[KernelConfig, int]:
    """The same tile of ragged rows for the interpreter: more keys, and more rows, so that row tiles are fewer; and few
    pieces, where there are more than one.

    Keys that lie in one page stay as many, so that a page of several tiles is run too. Rows are no more than partial
    results have room for.
    """
    block_n = config.block_n if _keys_in_page(shape, config) else _keys_across_pages(max_kv_len)
    few_rows = min(num_splits, INTERPRETED_SPLITS)
    has_room = num_splits == 1 or few_rows * INTERPRETED_ROWS <= num_splits * config.block_m
    rows = max(config.block_m, INTERPRETED_ROWS) if has_room else config.block_m
    return replace(config, block_n=block_n, block_m=rows), few_rows


def _keys_in_page(shape: AttentionShape, config: KernelConfig) -> int:
    """Keys of an interpreted tile that lies in one page, as the tile itself does; 0 where it does not."""
    keys = config.block_n
    while shape.page_size % (2 * keys) == 0 and 2 * keys <= INTERPRETED_KEYS:
        keys *= 2
    return keys if shape.page_size % keys == 0 else 0


def _keys_across_pages(max_kv_len: int) -> int:
    """Keys of an interpreted tile that lies in several pages: no more than any request has."""
    return min(INTERPRETED_KEYS, max(MIN_BLOCK_M, next_power_of_two(max_kv_len)))
