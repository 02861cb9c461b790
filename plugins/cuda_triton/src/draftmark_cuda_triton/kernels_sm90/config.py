"""Compile-time constants of a Hopper kernel, which every partition and every function that it calls receives."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class KernelConstants:
    """Constants of a kernel, as its parameters call them.

    What follows from them is worked out by functions of Triton's: what those say is part of the name under which a
    binary is cached, and what a property says would not be.

    Attributes:
        PAGE_SIZE: tokens of a page.
        BLOCK_M, BLOCK_N: packed rows of a row tile; keys of a tile.
        BOX_KEYS: keys that come together at least, inside one page; a box that has the last key ends with it (`mask`).
        HEAD_DIM: elements of a head.
        BLOCK_D, BLOCK_D_REST: columns of a tile, a power of two; those beside them, a smaller one, or 0
            (`sm90.split_head_dim`).
        STAGES, FP8_STAGES: tiles of K and V as wide as rows; those that are fetched, where they are narrow.
        TAIL_KIND: which keys of the tail a row sees (`mask`); RAGGED: each request has rows of its own number.
        WINDOW, CAP, SINKS: whether there is a window, a soft cap, a sink of each head.
        SCALED: bit 0 for K's scale, bit 1 for V's.
        WITH_LSE: whether the log of a row's mass is stored too.
        OVERHEAD_TILES: see `kernels.split_kv.request_overhead`.
        INTRA_WG_OVERLAP: a group's softmax runs beside its own products too.
        NUM_CONSUMER_WGS: warp groups that fold.
        KV_HEADS_PER_TILE: KV heads that are beside each other in a tile, as columns of one; the group is then that of
            both.
        STRIDE_ALIGN: elements that rows of q and out, and a row's heads, lie a multiple of apart.
        GATHER_KV: keys are gathered (`mainloop.wait_full`).
        SPLIT_KV: row tiles of EXTEND are cut by their keys (`scheduler`).
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
    RAGGED: bool
    OVERHEAD_TILES: int = 0
    INTRA_WG_OVERLAP: bool = False
    NUM_CONSUMER_WGS: int = 1
    KV_HEADS_PER_TILE: int = 1
    BLOCK_D_REST: int = 0
    STRIDE_ALIGN: int = 1
    GATHER_KV: bool = False
    SPLIT_KV: bool = False


@gluon.constexpr_function
def make_constants(**values):
    """`KernelConstants` of these names, inside a kernel."""
    return KernelConstants(**values)


@gluon.constexpr_function
def column_parts(CFG):
    """Columns of each part of a tile. Registers and shared memory are powers of two; a tile is one of them, or two."""
    return (CFG.BLOCK_D, CFG.BLOCK_D_REST) if CFG.BLOCK_D_REST else (CFG.BLOCK_D,)


@gluon.constexpr_function
def num_column_parts(CFG):
    """Parts of a tile."""
    return len(column_parts(CFG))


@gluon.constexpr_function
def part_width(CFG, part):
    """Columns of a part."""
    return column_parts(CFG)[part]


@gluon.constexpr_function
def part_offset(CFG, part):
    """The first of a part's columns, counted from the tile's."""
    return sum(column_parts(CFG)[:part])


@gluon.constexpr_function
def uses_pingpong(CFG):
    """Whether two groups take turns. Products of more than 128 columns are long enough to leave it to chance."""
    return CFG.NUM_CONSUMER_WGS == 2 and CFG.INTRA_WG_OVERLAP and sum(column_parts(CFG)) <= 128


@gluon.constexpr_function
def has_unmasked_loop(CFG):
    """Whether tiles that may be masked have a loop of their own. Of 64 keys a tile of two groups is over so soon that a
    branch in it is a tenth of its time.
    """
    return CFG.NUM_CONSUMER_WGS == 2 and CFG.BLOCK_N == 64 and sum(column_parts(CFG)) <= 160 and not CFG.WINDOW


@gluon.constexpr_function
def is_register_limited(CFG):
    """Whether two groups fold beside four warps that gather: what they hold early is spilled."""
    return CFG.GATHER_KV and CFG.NUM_CONSUMER_WGS == 2


@gluon.constexpr_function
def prefetches_q(CFG):
    """Whether rows of q are on their way while those before are stored: where registers hold both without spilling."""
    return sum(column_parts(CFG)) <= 160 and not is_register_limited(CFG)


@gluon.constexpr_function
def work_tile_words(CFG):
    """Words of an item of the agenda: what it is, and of a cut one which of its tiles, and where its partials go."""
    return 10 if CFG.SPLIT_KV else 7


@gluon.constexpr_function
def num_empty_arrivals(CFG):
    """Arrivals that give a tile back: of each thread that folds; of three groups, which are slower so, one of each."""
    return CFG.NUM_CONSUMER_WGS if CFG.NUM_CONSUMER_WGS == 3 else 128 * CFG.NUM_CONSUMER_WGS


@gluon.constexpr_function
def scores_layout(CFG):
    """Layout of a group's scores, ``[64, BLOCK_N]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CFG.BLOCK_N, 16])


@gluon.constexpr_function
def acc_layout(width):
    """Layout of a group's sums, ``[64, width]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def row_io_layout(width):
    """Layout of rows between memory and a group."""
    return row_copy_layout(width, 4)


@gluon.constexpr_function
def row_copy_layout(width, warps):
    """Layout of rows that warps move, 16 bytes a thread: a row's threads are neighbours in a warp."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


LOAD_K, LOAD_V, UPCAST, GATHER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
"""What a role brings: boxes of K, boxes of V, both as wide as rows from a ring of narrow ones, or keys one by one."""


@gluon.constexpr_function
def takes_work_tiles(role):
    """Whether a role is the first to ask for a tile: the one that takes a program's work."""
    return role in (LOAD_K.value, GATHER.value)
