"""Compile-time constants of the Hopper kernels, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class KernelConstants:
    """Holds the compile-time constants of one kernel; every partition and device function receives them as CFG.

    Derived values are Triton constexpr functions, not properties: Triton includes such functions in the cache key of a
    binary, but not properties.

    Attributes:
        PAGE_SIZE: number of tokens in a page.
        BLOCK_M: packed rows of a row tile.
        BLOCK_N: keys of a key tile.
        BOX_KEYS: number of keys of the smallest TMA box; a box lies inside one page. The box with the request's last
            key ends with that key (`mask`).
        HEAD_DIM: elements of a head.
        BLOCK_D: columns of a tile's first part, a power of two.
        BLOCK_D_REST: columns of its second part, a smaller power of two, or 0 (`sm90.split_head_dim`).
        STAGES: pipeline stages of K and V tiles in q's dtype.
        FP8_STAGES: pipeline stages of e4m3 tiles, before they are upcast.
        TAIL_KIND: mask of the tail (the keys after the prefix): causal chain, tree or bidirectional block (`mask`).
        WINDOW, CAP, SINKS: True if the model has a sliding window, a soft cap, or a sink logit for each head.
        SCALED: bit 0: K has a scale; bit 1: V has one.
        WITH_LSE: the kernel also stores the log-sum-exp of each row.
        OVERHEAD_TILES: fixed cost of a request, in key tiles (`kernels.split_kv.request_overhead`).
        INTRA_WG_OVERLAP: the softmax of a warp group overlaps its own matrix products.
        NUM_CONSUMER_WGS: consumer warp groups of a CTA.
        KV_HEADS_PER_TILE: adjacent KV heads in one tile, as columns; the query heads of all of them form one group.
        STRIDE_ALIGN: power of two that divides the strides of q's and out's rows and heads, in elements.
        GATHER_KV: keys are gathered by cp.async instead of TMA boxes (`mainloop.wait_full`).
        SPLIT_KV: row tiles of prefill are split along their keys (`tile_scheduler`).
        ROUNDS: q and the softmax probabilities are rounded to e4m3, and K and V are multiplied as stored (`mma_e4m3`).
    """

    PAGE_SIZE: int
    BLOCK_M: int
    BLOCK_N: int
    BOX_KEYS: int
    HEAD_DIM: int
    BLOCK_D: int
    STAGES: int
    FP8_STAGES: int
    WINDOW: bool
    CAP: bool
    SCALED: int
    SINKS: bool
    WITH_LSE: bool
    TAIL_KIND: int
    OVERHEAD_TILES: int = 0
    INTRA_WG_OVERLAP: bool = False
    NUM_CONSUMER_WGS: int = 1
    KV_HEADS_PER_TILE: int = 1
    BLOCK_D_REST: int = 0
    STRIDE_ALIGN: int = 1
    GATHER_KV: bool = False
    SPLIT_KV: bool = False
    ROUNDS: bool = False


@gluon.constexpr_function
def make_constants(**values):
    """Create `KernelConstants` inside a kernel."""
    return KernelConstants(**values)


@gluon.constexpr_function
def column_parts(CFG):
    """Return the columns of each part of a tile: one part, or two if they need less padding (`sm90.split_head_dim`)."""
    return (CFG.BLOCK_D, CFG.BLOCK_D_REST) if CFG.BLOCK_D_REST else (CFG.BLOCK_D,)


@gluon.constexpr_function
def num_column_parts(CFG):
    """Return the number of column parts of a tile."""
    return len(column_parts(CFG))


@gluon.constexpr_function
def part_width(CFG, part):
    """Return the number of columns of a part."""
    return column_parts(CFG)[part]


@gluon.constexpr_function
def part_offset(CFG, part):
    """Return the first column of a part within the tile."""
    return sum(column_parts(CFG)[:part])


@gluon.constexpr_function
def uses_pingpong(CFG):
    """Return True if two warp groups issue their matrix products alternately.

    Above 128 columns the products take so long that a forced order does not help.
    """
    return CFG.NUM_CONSUMER_WGS == 2 and CFG.INTRA_WG_OVERLAP and sum(column_parts(CFG)) <= 128


@gluon.constexpr_function
def has_unmasked_loop(CFG):
    """Return True if the kernel has a second loop, without mask code, for unmasked tiles.

    With 64 keys a tile and two warp groups, a tile takes so little time that a branch to the mask code costs a tenth of
    it.
    """
    return CFG.NUM_CONSUMER_WGS == 2 and CFG.BLOCK_N == 64 and sum(column_parts(CFG)) <= 160 and not CFG.WINDOW


@gluon.constexpr_function
def is_register_limited(CFG):
    """Return True if registers spill easily: with two consumer warp groups and four gathering producer warps."""
    return CFG.GATHER_KV and CFG.NUM_CONSUMER_WGS == 2


@gluon.constexpr_function
def prefetches_q(CFG):
    """Return True if the next row tile's q loads while the output is stored, which needs registers for both."""
    return sum(column_parts(CFG)) <= 160 and not is_register_limited(CFG)


@gluon.constexpr_function
def work_tile_words(CFG):
    """Return the number of int32 words of a work tile's record: `WorkTile`, and with SPLIT_KV also `KvRange`."""
    return 10 if CFG.SPLIT_KV else 7


@gluon.constexpr_function
def num_empty_arrivals(CFG):
    """Return the number of arrivals that complete an empty barrier.

    With one or two consumer warp groups every thread arrives. With three, that is slower, so one thread of each group
    arrives.
    """
    return CFG.NUM_CONSUMER_WGS if CFG.NUM_CONSUMER_WGS == 3 else 128 * CFG.NUM_CONSUMER_WGS


@gluon.constexpr_function
def scores_layout(CFG):
    """Return the register layout of a warp group's scores, ``[64, BLOCK_N]``."""
    return acc_layout(CFG.BLOCK_N, CFG.ROUNDS)


@gluon.constexpr_function
def acc_layout(width, rounds=False):
    """Return the register layout of a warp group's accumulator, ``[64, width]``; `rounds` for operands in e4m3."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32 if rounds else 16])


@gluon.constexpr_function
def weights_in_word(CFG):
    """Return the number of adjacent softmax probabilities in one register of a wgmma operand."""
    return 4 if CFG.ROUNDS else 2


@gluon.constexpr_function
def row_io_layout(width):
    """Return the layout of rows that one warp group loads from or stores to global memory."""
    return row_copy_layout(width, 4)


@gluon.constexpr_function
def row_copy_layout(width, warps):
    """Return the layout of rows that `warps` warps copy: 8 elements a thread, adjacent threads in one row."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def weights_layout(CFG, part):
    """Return the register layout of the softmax probabilities as the wgmma operand of a column part."""
    return gl.DotOperandLayout(0, acc_layout(part_width(CFG, part), CFG.ROUNDS), weights_in_word(CFG))


LOAD_K, LOAD_V, UPCAST, GATHER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
"""Tasks of a producer partition: load K by TMA, load V by TMA, upcast e4m3 tiles to q's dtype, gather by cp.async.

With ROUNDS the warps of UPCAST transpose V instead.
"""


@gluon.constexpr_function
def takes_work_tiles(role):
    """Return True for the CTA's one partition that fetches work tiles from the scheduler and publishes them."""
    return role in (LOAD_K.value, GATHER.value)
