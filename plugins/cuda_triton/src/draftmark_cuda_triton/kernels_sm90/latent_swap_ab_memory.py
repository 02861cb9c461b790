"""Shared memory of `latent_swap_ab`: pipeline stages of e4m3 rows, rows of q in float16, and messages with p."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import reinterpret
from .latent_pipeline import allocate
from .latent_swap_ab_config import BUFFERS, NUM_PARTS, barrier_arrivals, barrier_index, part_cells, piece_width


class SwapAbMemory(NamedTuple):
    """Shared memory of a CTA.

    The softmax warp group sends messages to both value warp groups. A request has three kinds of messages: the number
    of its key tiles; for each key tile p, and whether the old accumulators are rescaled; the factors of the output and
    the places of its rows.

    Attributes:
        tiles: ``[parts · STAGES, BLOCK_N, cells]`` int16, each part of key tiles; a cell has two e4m3 values.
        rests: ``[STAGES, BLOCK_N, REST_DIM / 2]`` int16; () if rows have no rest.
        queries: ``[VALUE_DIM / 64, BLOCK_M, 64]``, the value part of rows of q as loaded; then their operands
            (`query_operands`).
        query_rests: ``[1, BLOCK_M, REST_DIM]``, the rest of rows of q as loaded, then its operands; () without one.
        weights: ``[BUFFERS, BLOCK_M, BLOCK_N]`` float16 p.
        factors: ``[BUFFERS, BLOCK_M]`` float32, factors of the accumulators.
        places: ``[BUFFERS, BLOCK_M]`` int64, offset of each row in the output or in the partial results, in elements;
            -1 for none.
        words: ``[BUFFERS, 4]`` int32, 1 if `factors` are not all 1; or the number of key tiles, negative for a
            partial result, 0 at the end.
        pivots: ``[BLOCK_M]`` float32, exponent of 2 that each row's p is relative to.
        flags: ``[4]`` int32 (`mma_fp8_swap_ab.any_above`).
        barriers: mbarriers; `latent_swap_ab_config.barrier_index` has the index of each kind.
    """

    tiles: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    query_rests: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    places: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    pivots: gl.shared_memory_descriptor
    flags: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor


@gluon.jit
def make_swap_ab_memory(CFG: gl.constexpr):
    """Allocate `SwapAbMemory` and initialize its barriers."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    arrivals: gl.constexpr = barrier_arrivals(CFG)
    barriers = gl.allocate_shared_memory(gl.int64, [len(arrivals), 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(len(arrivals)):
        mbarrier.init(barriers.index(i), count=arrivals[i])
    rests = ()
    query_rests = ()
    if CFG.REST_DIM > 0:
        rests = allocate(gl.int16, CFG.STAGES, CFG.BLOCK_N, CFG.REST_DIM // 2)
        query_rests = allocate(gl.float16, 1, CFG.BLOCK_M, CFG.REST_DIM)
    return SwapAbMemory(
        tiles=allocate(gl.int16, NUM_PARTS * CFG.STAGES, CFG.BLOCK_N, part_cells(CFG)), rests=rests,
        queries=allocate(gl.float16, CFG.VALUE_DIM // 64, CFG.BLOCK_M, 64), query_rests=query_rests,
        weights=allocate(gl.float16, BUFFERS, CFG.BLOCK_M, CFG.BLOCK_N),
        factors=gl.allocate_shared_memory(gl.float32, [BUFFERS, CFG.BLOCK_M], plain),
        places=gl.allocate_shared_memory(gl.int64, [BUFFERS, CFG.BLOCK_M], plain),
        words=gl.allocate_shared_memory(gl.int32, [BUFFERS, 4], plain),
        pivots=gl.allocate_shared_memory(gl.float32, [CFG.BLOCK_M], plain),
        flags=gl.allocate_shared_memory(gl.int32, [4], plain), barriers=barriers,
    )  # fmt: skip


@gluon.jit
def full_barrier(memory, part: gl.constexpr, stage, CFG: gl.constexpr):
    """Return the mbarrier that completes when a part of a stage is loaded."""
    return memory.barriers.index(barrier_index(CFG, 0) + part * CFG.STAGES + stage)


@gluon.jit
def empty_barrier(memory, part: gl.constexpr, stage, CFG: gl.constexpr):
    """Return the mbarrier that completes when no warp group reads a part of a stage."""
    return memory.barriers.index(barrier_index(CFG, 1) + part * CFG.STAGES + stage)


@gluon.jit
def tile_of(memory, part: gl.constexpr, stage, CFG: gl.constexpr):
    """Return a part of a stage, ``[BLOCK_N, cells]``."""
    return memory.tiles.index(part * CFG.STAGES + stage)


@gluon.jit
def message_full(memory, message, CFG: gl.constexpr):
    """Return the mbarrier that completes when a message is written."""
    return memory.barriers.index(barrier_index(CFG, 2) + message % BUFFERS)


@gluon.jit
def message_empty(memory, message, CFG: gl.constexpr):
    """Return the mbarrier that completes when no value warp group reads a message."""
    return memory.barriers.index(barrier_index(CFG, 3) + message % BUFFERS)


@gluon.jit
def message_phase(message):
    """Return the phase of the barriers of a message, counted over all requests."""
    return message // BUFFERS & 1


@gluon.jit
def word_of(memory, message):
    """Return the word of a message in every thread, without a shuffle."""
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(memory.words.index(message % BUFFERS).load(everywhere), 0)


@gluon.jit
def set_word(memory, message, word):
    """Write the word of a message."""
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    memory.words.index(message % BUFFERS).store(gl.full([4], 0, gl.int32, everywhere) + word)


@gluon.jit
def query_full(memory, CFG: gl.constexpr):
    """Return the mbarrier that completes when the rows of q of a request are loaded."""
    return memory.barriers.index(barrier_index(CFG, 4))


@gluon.jit
def query_empty(memory, CFG: gl.constexpr):
    """Return the mbarrier that completes when all scores of a request are complete."""
    return memory.barriers.index(barrier_index(CFG, 5))


@gluon.jit
def scores_done(memory, number, CFG: gl.constexpr):
    """Return the mbarrier that completes when the scores of the key tile after `number`, or all scores, are complete.

    Key tiles are counted over all requests. A barrier is used again when the values of its key tile are complete.
    """
    return memory.barriers.index(barrier_index(CFG, 6) + number % BUFFERS)


@gluon.jit
def query_operands(rows):
    """Return the two float16 operands of blocks of q (`upcast_k`), ``[2 · blocks, BLOCK_M, columns / 2]``."""
    COUNT: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    WIDTH: gl.constexpr = rows.shape[2] // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.float16)
    return reinterpret(rows, gl.float16, [2 * COUNT, ROWS, WIDTH], layout)


@gluon.jit
def query_piece(rows, piece: gl.constexpr, HIGH: gl.constexpr, CFG: gl.constexpr):
    """Return the columns of an operand of blocks of q (`query_operands`) that belong to a piece of K."""
    WIDTH: gl.constexpr = piece_width(CFG)
    TIMES: gl.constexpr = rows.shape[2] // 2 // WIDTH
    operand = query_operands(rows).index(piece // TIMES * 2 + HIGH)
    if TIMES > 1:
        operand = operand.slice(piece % TIMES * WIDTH, WIDTH, dim=1)
    return operand
