"""Kernel configuration and the sizes that every heuristic uses. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftmark import AttentionShape, ceil_div

OVERHEAD_TILES = 2
"""What a request costs a piece beside its tiles, in tiles: filling the pipeline, the masked tile, storing."""
MIN_BLOCK_M = 16
"""Packed rows of the smallest row tile: what `mma` takes at least."""
SCHEDULE_HEADER_ROWS = 2
"""Rows of EXTEND's row tiles before the first one: how many were taken, how many there are, in which order."""


@dataclass(frozen=True)
class KernelConfig:
    """How a kernel cuts its work.

    Attributes:
        block_m: packed rows (query rows x group heads) of a row tile.
        block_n: keys of a tile.
        num_warps, num_stages: Triton's launch options; stages are tiles in flight.
        ctas_per_sm: row tiles that one multiprocessor holds at a time.
        use_tma: tiles come through the copy engine; a tile of keys lies in one page of a contiguous cache.
        num_consumer_wgs: warp groups of 64 rows of a program of `kernels_sm90`, which then runs this tile; 0: `kernels`
            do.
        num_fp8_stages: there, tiles of narrow (e4m3) keys in flight before they are widened into the stages.
        fp8_swap_ab: there, narrow keys are widened in registers, by the program's only group, of block_m rows.
        gather_kv: there, four warps gather keys from pages of any size, where one fetches boxes.
        kv_heads_per_tile: there, KV heads that lie beside each other and are worked on as one.
        box_full_head: there, a box has all 256 bytes of a head, not 128.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    use_tma: bool = False
    num_consumer_wgs: int = 0
    num_fp8_stages: int = 0
    fp8_swap_ab: bool = False
    gather_kv: bool = False
    kv_heads_per_tile: int = 1
    box_full_head: bool = False


def row_tiles(config: KernelConfig, q_len: Any, group: int) -> Any:
    """Row tiles that hold q_len rows x group heads, of all KV heads that are worked on as one."""
    return ceil_div(q_len * group, config.block_m)


def visible_prefix(shape: AttentionShape, prefix: int) -> int:
    """Keys of a prefix that any row of its request sees."""
    return prefix if shape.window_left < 0 else min(prefix, shape.window_left)


def max_row_tiles(config: KernelConfig, group: int, num_rows: Any, num_reqs: Any) -> Any:
    """Row tiles that any split of num_rows over num_reqs requests needs at most."""
    return num_rows * group // config.block_m + num_reqs


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
