"""Kernel configurations for Triton's interpreter on CPU tensors: large tiles and few splits."""

from __future__ import annotations

from dataclasses import replace

from draftmark import AttentionShape

from .common import MIN_BLOCK_M, KernelConfig, next_power_of_two, row_tiles
from .split_kv import partial_rows

INTERPRETED_KEYS = 256
"""Maximum keys of an interpreted tile. NumPy takes about the same time for 64 keys and for 256."""
INTERPRETED_ROWS = 256
"""Maximum packed rows of an interpreted row tile. A program costs milliseconds whatever its number of rows."""
INTERPRETED_SPLITS = 2
"""Maximum KV splits in the interpreter: the fewest that still exercise splitting and combining."""


def interpreted_config(
    shape: AttentionShape, config: KernelConfig, q_len: int, num_splits: int, max_kv_len: int
) -> tuple[KernelConfig, int]:
    """Return the configuration and number of KV splits of a decode or verify batch for the interpreter.

    Tiles are larger and splits fewer, because each interpreted program costs milliseconds. While a request has several
    row tiles, block_m doubles, up to INTERPRETED_ROWS. It stops if the partial results would exceed the rows allocated
    for `config` and `num_splits`. One split is used if every request fits into one KV tile.
    """
    block_n = _keys_in_page(shape, config) or _keys_across_pages(max_kv_len)
    larger_tiles = replace(config, block_m=min(config.block_m, 128), block_n=block_n, kv_heads_per_tile=1)
    few_splits = 1 if max_kv_len <= larger_tiles.block_n else min(num_splits, INTERPRETED_SPLITS)
    room = partial_rows(shape, config, num_splits, q_len)
    while row_tiles(larger_tiles, q_len, shape.group_size) > 1 and larger_tiles.block_m < INTERPRETED_ROWS:
        larger = replace(larger_tiles, block_m=2 * larger_tiles.block_m)
        if partial_rows(shape, larger, few_splits, q_len) > room:
            break
        larger_tiles = larger
    return larger_tiles, few_splits


def interpreted_prefill_config(
    shape: AttentionShape, config: KernelConfig, max_kv_len: int, num_splits: int
) -> tuple[KernelConfig, int]:
    """Return the configuration and number of KV splits of an EXTEND batch for the interpreter.

    block_m rises to INTERPRETED_ROWS if the partial results still fit into the buffers allocated for the GPU. If a page
    holds several whole tiles, block_n is unchanged, so that tests cover such pages. Otherwise block_n grows.
    """
    block_n = config.block_n if _keys_in_page(shape, config) else _keys_across_pages(max_kv_len)
    few_splits = min(num_splits, INTERPRETED_SPLITS)
    has_room = num_splits == 1 or few_splits * INTERPRETED_ROWS <= num_splits * config.block_m
    rows = max(config.block_m, INTERPRETED_ROWS) if has_room else config.block_m
    return replace(config, block_n=block_n, block_m=rows), few_splits


def _keys_in_page(shape: AttentionShape, config: KernelConfig) -> int:
    """Return the number of keys of an interpreted tile inside one page, or 0 if tiles span pages."""
    keys = config.block_n
    while shape.page_size % (2 * keys) == 0 and 2 * keys <= INTERPRETED_KEYS:
        keys *= 2
    return keys if shape.page_size % keys == 0 else 0


def _keys_across_pages(max_kv_len: int) -> int:
    """Return the number of keys of an interpreted tile that spans pages: at most INTERPRETED_KEYS."""
    return min(INTERPRETED_KEYS, max(MIN_BLOCK_M, next_power_of_two(max_kv_len)))
