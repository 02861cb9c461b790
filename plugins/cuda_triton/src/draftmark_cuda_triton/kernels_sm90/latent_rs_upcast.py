"""e4m3 rows of `latent_rs`: each value warp group upcasts its half of a key tile into a stage, between its products.

    3 TMA warps     3 chunks of a half in e4m3    value warp group       2 stages in q's dtype
    page ids ─► │ columns 0… │ 128… │ 0… │ ── full ─► e4m3 to 16 bits ── full ─► scores, then values
                 ◄── empty ─────────────────────────

Each key is upcast once for all heads and rows of a row tile. A chunk of a tile takes the place of the same chunk two
tiles before, as soon as its products are complete, during the products of the next chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .config import row_copy_layout
from .gluon_compat import reinterpret, thread_barrier
from .latent_config import num_chunks
from .latent_rs_memory import (
    advance_both,
    empty_barrier,
    full_barrier,
    raw_empty_barrier,
    raw_full_barrier,
    raw_slot,
    tile_of,
)
from .producer_upcast import upcast

UPCAST_ROWS = gl.constexpr(64)
"""Keys of 64 columns that a warp group holds in registers at once."""


@gluon.jit
def upcast_part(raw, part, CFG: gl.constexpr):
    """Upcast a chunk, or the rest, of a key tile.

    Args:
        raw: ``[blocks · BLOCK_N, width]`` e4m3 in blocks of columns, each ``[BLOCK_N, width]`` contiguous.
        part: ``[BLOCK_N, blocks · width]`` in q's dtype, in the same blocks.
    """
    WIDTH: gl.constexpr = raw.shape[1]
    COUNT: gl.constexpr = raw.shape[0] // UPCAST_ROWS
    raw_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UPCAST_ROWS, WIDTH], raw.dtype)
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UPCAST_ROWS, WIDTH], part.dtype)
    raws = reinterpret(raw, raw.dtype, [COUNT, UPCAST_ROWS, WIDTH], raw_layout)
    parts = reinterpret(part, part.dtype, [COUNT, UPCAST_ROWS, WIDTH], part_layout)
    for i in gl.static_range(COUNT):
        x = raws.index(i).load(row_copy_layout(WIDTH, gl.num_warps()))
        parts.index(i).store(upcast(x, part.dtype))


@gluon.jit
def upcast_chunk(memory, number, stage, HALF: gl.constexpr, chunk: gl.constexpr, CFG: gl.constexpr):
    """Upcast one chunk of a half of the key tile `number` into a free stage."""
    slot, phase = raw_slot(number, HALF, chunk, CFG)
    mbarrier.wait(raw_full_barrier(memory, slot, CFG), phase)
    upcast_part(memory.raws.index(slot), tile_of(memory, HALF, chunk, stage, CFG), CFG)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(raw_empty_barrier(memory, slot, CFG), count=1)


@gluon.jit
def upcast_rest(memory, number, stage, phase, CFG: gl.constexpr):
    """Upcast the rest of the key tile `number` into a stage of the rest, when its last scores are complete."""
    slot, raw_phase = raw_slot(number, 2, 0, CFG)
    mbarrier.wait(raw_full_barrier(memory, slot, CFG), raw_phase)
    mbarrier.wait(empty_barrier(memory, 2, stage, CFG), phase ^ 1)
    upcast_part(memory.raw_rests.index(number & 1), memory.rests.index(stage), CFG)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(raw_empty_barrier(memory, slot, CFG), count=1)
    mbarrier.arrive(full_barrier(memory, 2, stage, CFG), count=1)


@gluon.jit
def upcast_chunks(
    memory, number, stage, rest_stage, rest_phase, HALF: gl.constexpr, FIRST: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Upcast the chunks of a half from FIRST on, then with HALF 1 the rest, which the scores read last."""
    for chunk in gl.static_range(FIRST, num_chunks(CFG)):
        upcast_chunk(memory, number, stage, HALF, chunk, CFG)
    mbarrier.arrive(full_barrier(memory, HALF, stage, CFG), count=1)
    if CFG.REST_DIM > 0 and HALF == 1:
        upcast_rest(memory, number, rest_stage, rest_phase, CFG)


@gluon.jit
def upcast_first_tiles(memory, state, first, stop, HALF: gl.constexpr, CFG: gl.constexpr):
    """Upcast the first STAGES key tiles of a request, of [first, stop).

    Args:
        state: stage and phase of the value part and of the rest (`advance_both`).
    """
    for number in range(first, gl.minimum(first + CFG.STAGES, stop)):
        stage, phase, rest_stage, rest_phase = state
        # One of these stages has the request's rows of q.
        mbarrier.wait(empty_barrier(memory, HALF, stage, CFG), phase ^ 1)
        upcast_chunks(memory, number, stage, rest_stage, rest_phase, HALF, 0, CFG)
        state = advance_both(state, CFG)
