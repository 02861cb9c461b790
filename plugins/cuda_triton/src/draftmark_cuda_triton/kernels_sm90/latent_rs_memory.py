"""Shared memory of `latent_rs`: pipeline stages of latent rows and of q, and the messages with p.

Each kind of memory is one allocation. A partition of the CTA keeps the address of every allocation in registers, of
which the value warp groups have few.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import reinterpret
from .latent_config import chunk_width, num_chunks
from .latent_pipeline import allocate
from .latent_rs_config import (
    barrier_arrivals,
    empty_barriers,
    full_barriers,
    in_registers,
    message_barriers,
    num_pieces,
    piece_width,
    query_barriers,
    raw_empty_barriers,
    raw_full_barriers,
    rest_in_registers,
)
from .pipeline import advance


class LatentMemory(NamedTuple):
    """Shared memory of a CTA.

    The softmax warp group sends messages to both value warp groups through `weights` to `places`. A request has three
    kinds of messages: the number of its key tiles; for each key tile, p and the factors of the old accumulators; the
    factors of the output and the places of its rows.

    Attributes:
        tiles: ``[2 · chunks · STAGES, BLOCK_N, chunk_width]``, the stages of each chunk of both halves (`tile_of`).
        rests: ``[REST_STAGES + 1, BLOCK_N, REST_DIM]``, the stages of the rest, then the rest of the rows of q unless
            it is in registers; () if rows have no rest.
        queries: ``[64, columns]``, the pieces of the value part of q that are not in registers.
        weights: ``[64, BLOCK_N]`` p in q's dtype. The other messages use its first bytes: `count_of`, `places_of`.
        factors: ``[64]`` float32, factor of each row's accumulators.
        raws: ``[2 · RAW_CHUNKS, chunk_width // 64 · BLOCK_N, 64]`` e4m3, chunks of key tiles in blocks of 64 columns,
            before they are upcast into a stage (`raw_slot`); () if the rows have q's dtype.
        raw_rests: ``[2, BLOCK_N, REST_DIM]`` e4m3, rests of key tiles; () without one.
        barriers: mbarriers; `latent_rs_config` has the index of each kind.
    """

    tiles: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor
    queries: tuple[gl.shared_memory_descriptor, ...]
    weights: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    raws: gl.shared_memory_descriptor
    raw_rests: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor


@gluon.jit
def make_latent_memory(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate `LatentMemory` and initialize its barriers."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rests = ()
    if CFG.REST_DIM > 0:
        rests = allocate(dtype, CFG.REST_STAGES + (0 if rest_in_registers(CFG) else 1), CFG.BLOCK_N, CFG.REST_DIM)
    arrivals: gl.constexpr = barrier_arrivals(CFG)
    barriers = gl.allocate_shared_memory(gl.int64, [len(arrivals), 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(len(arrivals)):
        mbarrier.init(barriers.index(i), count=arrivals[i])
    queries = ()
    for i in gl.static_range(num_pieces(CFG, 1)):
        if not in_registers(CFG, 1, i):
            queries = queries + (allocate(dtype, 1, 64, piece_width(CFG, 1, i)).index(0),)  # type: ignore[assignment]  # noqa: RUF005
    raws = ()
    raw_rests = ()
    if CFG.RAW_CHUNKS > 0:
        raws = allocate(gl.float8e4nv, 2 * CFG.RAW_CHUNKS, chunk_width(CFG) // 64 * CFG.BLOCK_N, 64)
        if CFG.REST_DIM > 0:
            raw_rests = allocate(gl.float8e4nv, 2, CFG.BLOCK_N, CFG.REST_DIM)
    return LatentMemory(
        tiles=allocate(dtype, 2 * num_chunks(CFG) * CFG.STAGES, CFG.BLOCK_N, chunk_width(CFG)), rests=rests,
        queries=queries, weights=allocate(dtype, 1, 64, CFG.BLOCK_N).index(0),
        factors=gl.allocate_shared_memory(gl.float32, [64], plain), raws=raws, raw_rests=raw_rests,
        barriers=barriers,
    )  # fmt: skip


@gluon.jit
def count_of(memory):
    """Return ``[32]`` int32, each element the number of key tiles; negative for a partial result; 0 at the end."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(memory.weights, gl.int32, [32 * memory.weights.shape[1]], plain).slice(0, 32)


@gluon.jit
def places_of(memory):
    """Return ``[64]`` int64, offset of each row in the output or in the partial results, in elements; -1 for none."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(memory.weights, gl.int64, [16 * memory.weights.shape[1]], plain).slice(0, 64)


@gluon.jit
def tile_of(memory, half: gl.constexpr, chunk: gl.constexpr, stage, CFG: gl.constexpr):
    """Return one chunk of a half of the value part of a stage, ``[BLOCK_N, chunk_width]``."""
    return memory.tiles.index((half * num_chunks(CFG) + chunk) * CFG.STAGES + stage)


@gluon.jit
def query_part(tile, CFG: gl.constexpr):
    """Return the 64 rows of q in a chunk or a rest of a stage, ``[64, columns]``."""
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CFG.BLOCK_M, WIDTH], tile.dtype)
    return reinterpret(tile, tile.dtype, [CFG.BLOCK_M, WIDTH], layout)


@gluon.jit
def full_barrier(memory, half: gl.constexpr, stage, CFG: gl.constexpr):
    """Return the mbarrier that completes when a half of a stage is loaded; half 2 is the rest."""
    return memory.barriers.index(full_barriers(CFG, half) + stage)


@gluon.jit
def empty_barrier(memory, half: gl.constexpr, stage, CFG: gl.constexpr):
    """Return the mbarrier that completes when no warp group reads a half of a stage; half 2 is the rest."""
    return memory.barriers.index(empty_barriers(CFG, half) + stage)


@gluon.jit
def raw_slot(number, PART: gl.constexpr, chunk: gl.constexpr, CFG: gl.constexpr):
    """Return the slot of an e4m3 chunk of the key tile `number`, counted over all requests, and its phase.

    Each half has RAW_CHUNKS slots. The two slots of the rest, PART 2, follow them.
    """
    if PART == 2:
        return 2 * CFG.RAW_CHUNKS + (number & 1), number // 2 & 1
    else:
        place = number * num_chunks(CFG) + chunk
        return PART * CFG.RAW_CHUNKS + place % CFG.RAW_CHUNKS, place // CFG.RAW_CHUNKS & 1


@gluon.jit
def raw_full_barrier(memory, slot, CFG: gl.constexpr):
    """Return the mbarrier that completes when an e4m3 chunk is loaded."""
    return memory.barriers.index(raw_full_barriers(CFG) + slot)


@gluon.jit
def raw_empty_barrier(memory, slot, CFG: gl.constexpr):
    """Return the mbarrier that completes when an e4m3 chunk is upcast."""
    return memory.barriers.index(raw_empty_barriers(CFG) + slot)


@gluon.jit
def query_barrier(memory, PART: gl.constexpr, CFG: gl.constexpr):
    """Return the mbarrier that completes when the next request's rows of q can load into a stage, next to e4m3 rows.

    Their producer does not wait for the stages of key tiles, so it cannot follow the phases of the empty barriers.
    """
    return memory.barriers.index(query_barriers(CFG) + PART)


@gluon.jit
def message_full(memory, CFG: gl.constexpr):
    """Return the mbarrier that completes when a message is written."""
    return memory.barriers.index(message_barriers(CFG))


@gluon.jit
def message_empty(memory, CFG: gl.constexpr):
    """Return the mbarrier that completes when no value warp group reads the message."""
    return memory.barriers.index(message_barriers(CFG) + 1)


@gluon.jit
def scores_done(memory, CFG: gl.constexpr):
    """Return the mbarrier that completes when the scores of the next key tile, or all scores, are complete."""
    return memory.barriers.index(message_barriers(CFG) + 2)


@gluon.jit
def advance_both(state, CFG: gl.constexpr):
    """Return the next stage and phase of the value part, and of the rest."""
    stage, phase, rest_stage, rest_phase = state
    stage, phase = advance(stage, phase, CFG.STAGES)
    rest_stage, rest_phase = advance(rest_stage, rest_phase, CFG.REST_STAGES)
    return stage, phase, rest_stage, rest_phase
