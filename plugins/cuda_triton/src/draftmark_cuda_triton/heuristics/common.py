"""Kernel configuration and the size functions that every heuristic uses. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from draftmark import AttentionShape, ceil_div

OVERHEAD_TILES = 2
"""Fixed cost of a request in a split, in KV tiles: filling the pipeline, the masked tile and storing the result."""
MIN_BLOCK_M = 16
"""Packed rows of the smallest row tile: the M extent of the `mma` instruction."""
SCHEDULE_HEADER_ROWS = 2
"""Rows of `row_tiles` before the first row tile; `prefill_schedule.write_metadata_prefill` lists their 4 words."""


class Kernel(Enum):
    """Attention kernels by package and load of keys. Prefill and the other modes have each of them, except SM90_FP8."""

    POINTERS = "kernels"
    """Any GPU; keys are loaded by pointer."""
    BOXES = "kernels, TMA"
    """Any GPU from sm_90 on; a KV tile lies in one page of a contiguous cache and is loaded as one TMA box."""
    SM90 = "kernels_sm90"
    """Hopper; a TMA box for each page."""
    SM90_GATHER = "kernels_sm90, gather"
    """Hopper; four producer warps gather keys with cp.async from pages of any size."""
    SM90_FP8 = "kernels_sm90, fp8"
    """Hopper; e4m3 is upcast in registers and the MMA operands are swapped, with one consumer warp group."""
    SM90_ROUNDED = "kernels_sm90, e4m3 x e4m3"
    """Hopper; q and the softmax probabilities are rounded to e4m3, and V is transposed by producer warps."""
    SM90_LATENT = "kernels_sm90, latent"
    """Hopper; latent rows, with q in shared memory."""
    SM90_LATENT_RS = "kernels_sm90, latent, q in registers"
    """Hopper; two row tiles or more of latent rows, narrow values, or e4m3, which is upcast in shared memory."""
    SM90_LATENT_SWAP_AB = "kernels_sm90, latent, operands swapped"
    """Hopper; few packed rows over e4m3 latent rows, which are upcast in registers."""

    @property
    def is_sm90(self) -> bool:
        """True for the kernels in `kernels_sm90`."""
        return self not in (Kernel.POINTERS, Kernel.BOXES)

    @property
    def is_latent(self) -> bool:
        """True for the kernels in `kernels_sm90` for latent rows."""
        return self in (Kernel.SM90_LATENT, Kernel.SM90_LATENT_RS, Kernel.SM90_LATENT_SWAP_AB)


@dataclass(frozen=True)
class KernelConfig:
    """Tile shape, pipeline and occupancy of an attention kernel.

    Attributes:
        block_m: packed rows of a row tile; a packed row is one query row (token) of one query head of the GQA group.
        block_n: keys of a KV tile.
        num_warps, num_stages: Triton's launch options; num_stages is the number of KV tiles in flight.
        ctas_per_sm: CTAs that are resident on one SM.
        kernel: the kernel. The fields below apply to those in `kernels_sm90`.
        num_consumer_wgs: consumer warp groups of a CTA, 64 packed rows each; 0 for the kernels in `kernels`.
        num_fp8_stages: e4m3 tiles in flight before producer warps upcast them into the 16-bit stages.
        kv_heads_per_tile: adjacent KV heads that are processed as one head of a larger head_dim.
        box_full_head: a TMA box holds all 256 bytes of a head, instead of 128 bytes.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    kernel: Kernel = Kernel.POINTERS
    num_consumer_wgs: int = 0
    num_fp8_stages: int = 0
    kv_heads_per_tile: int = 1
    box_full_head: bool = False


def row_tiles(config: KernelConfig, q_len: Any, group: int) -> Any:
    """Return the number of row tiles for q_len rows of `group` query heads, for each KV head."""
    return ceil_div(q_len * group, config.block_m)


def visible_prefix(shape: AttentionShape, prefix: int) -> int:
    """Return the number of prefix tokens that at least one row of the request sees under the window."""
    return prefix if shape.window_left < 0 else min(prefix, shape.window_left)


def max_row_tiles(config: KernelConfig, group: int, num_rows: Any, num_reqs: Any) -> Any:
    """Return the upper bound of row tiles for any distribution of num_rows rows over num_reqs requests."""
    return num_rows * group // config.block_m + num_reqs


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
