"""What a kernel of `hopper` is compiled for: its constants, which go to every role and to whom it calls together."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class Constants:
    """Constants of a kernel, as its parameters call them.

    What follows from them is worked out by functions of Triton's: what those say is part of the name under which a
    binary is cached, and what a property says would not be.

    Attributes:
        PAGE: tokens of a page.
        BLOCK_M, BLOCK_N: packed rows of a row tile; keys of a tile.
        BOX: keys that come together at least, inside one page; a box that has the last key ends with it (`mask`).
        HEAD_DIM: elements of a head.
        BLOCK_D, REST: columns of a tile, a power of two; those beside them, a smaller one, or 0 (`tiling.columns`).
        STAGES, DEPTH: tiles of K and V as wide as rows; those that are fetched, where they are narrow.
        TAIL: which keys of the tail a row sees (`mask`); RAGGED: each request has rows of its own number.
        WINDOW, CAP, SINKS: whether there is a window, a soft cap, a sink of each head.
        SCALED: bit 0 for K's scale, bit 1 for V's.
        WITH_LSE: whether the log of a row's mass is stored too.
        ITEM_COST: see `kernels.split.surplus`.
        OVERLAP: a group's softmax runs beside its own products too.
        MEMBERS: warp groups that fold.
        HEADS: KV heads that are beside each other in a tile, as columns of one; the group is then that of both.
        STEP: elements that rows of q and out, and a row's heads, lie a multiple of apart.
        ONE_BY_ONE: keys are gathered (`fold.wait_for_tile`).
        CUT: row tiles of EXTEND are cut by their keys (`agenda`).
    """

    PAGE: int
    BLOCK_M: int
    BLOCK_N: int
    BOX: int
    HEAD_DIM: int
    BLOCK_D: int
    STAGES: int
    DEPTH: int
    WINDOW: bool
    CAP: bool
    SCALED: int
    SINKS: bool
    WITH_LSE: bool
    TAIL: int
    RAGGED: bool
    ITEM_COST: int = 0
    OVERLAP: bool = False
    MEMBERS: int = 1
    HEADS: int = 1
    REST: int = 0
    STEP: int = 1
    ONE_BY_ONE: bool = False
    CUT: bool = False


@gluon.constexpr_function
def constants(**named):
    """`Constants` of these names, inside a kernel."""
    return Constants(**named)


@gluon.constexpr_function
def widths(C):
    """Columns of each part of a tile. Registers and shared memory are powers of two; a tile is one of them, or two."""
    return (C.BLOCK_D, C.REST) if C.REST else (C.BLOCK_D,)


@gluon.constexpr_function
def parts_of(C):
    """Parts of a tile."""
    return len(widths(C))


@gluon.constexpr_function
def width_of(C, part):
    """Columns of a part."""
    return widths(C)[part]


@gluon.constexpr_function
def first_of(C, part):
    """The first of a part's columns, counted from the tile's."""
    return sum(widths(C)[:part])


@gluon.constexpr_function
def takes_turns(C):
    """Whether two groups take turns. Products of more than 128 columns are long enough to leave it to chance."""
    return C.MEMBERS == 2 and C.OVERLAP and sum(widths(C)) <= 128


@gluon.constexpr_function
def parts_loops(C):
    """Whether tiles that may be masked have a loop of their own. Of 64 keys a tile of two groups is over so soon that a
    branch in it is a tenth of its time.
    """
    return C.MEMBERS == 2 and C.BLOCK_N == 64 and sum(widths(C)) <= 160 and not C.WINDOW


@gluon.constexpr_function
def is_crowded(C):
    """Whether two groups fold beside four warps that gather: what they hold early is spilled."""
    return C.ONE_BY_ONE and C.MEMBERS == 2


@gluon.constexpr_function
def brings_ahead(C):
    """Whether rows of q are on their way while those before are stored: where registers hold both without spilling."""
    return sum(widths(C)) <= 160 and not is_crowded(C)


@gluon.constexpr_function
def words_of(C):
    """Words of an item of the agenda: what it is, and of a cut one which of its tiles, and where its partials go."""
    return 10 if C.CUT else 7


@gluon.constexpr_function
def leavers(C):
    """Arrivals that give a tile back: of each thread that folds; of three groups, which are slower so, one of each."""
    return C.MEMBERS if C.MEMBERS == 3 else 128 * C.MEMBERS


@gluon.constexpr_function
def scores_of(C):
    """Layout of a group's scores, ``[64, BLOCK_N]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])


@gluon.constexpr_function
def output_of(width):
    """Layout of a group's sums, ``[64, width]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def moving_of(width):
    """Layout of rows between memory and a group."""
    return spread_of(width, 4)


@gluon.constexpr_function
def spread_of(width, warps):
    """Layout of rows that warps move, 16 bytes a thread: a row's threads are neighbours in a warp."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])
