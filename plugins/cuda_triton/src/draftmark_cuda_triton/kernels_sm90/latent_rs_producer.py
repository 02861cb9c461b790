"""TMA producers of `latent_rs`: one warp each loads the left half of the values, the right half, and the rest.

Each part has its own barriers, so a product starts when its own part has arrived, and a part is loaded again as soon as
its last product has ended. The rows of q of a request take the stage before the request's first key tile. So they load
while the previous request is still in progress. e4m3 rows load into `LatentMemory.raws` instead of the stages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import reinterpret, tma_load
from .latent_config import chunk_width, half_width, num_chunks, part_bytes, query_bytes
from .latent_producer import load_part, locate_box
from .latent_rs_memory import (
    empty_barrier,
    full_barrier,
    query_barrier,
    raw_empty_barrier,
    raw_full_barrier,
    raw_slot,
    tile_of,
)
from .pipeline import advance


@gluon.jit
def load_query_part(boxes, smem, full, row, column: gl.constexpr, width: gl.constexpr, CFG: gl.constexpr):
    """Issue the boxes of one part of 64 rows of q; a box has at most 128 bytes of each row."""
    BOX_WIDTH: gl.constexpr = boxes.block_shape[1]
    TIMES: gl.constexpr = width // BOX_WIDTH
    views = reinterpret(smem, boxes.dtype, [TIMES, CFG.BLOCK_M, BOX_WIDTH], boxes.layout)
    for i in gl.static_range(TIMES):
        tma_load(boxes, [row, column + i * BOX_WIDTH], full, views.index(i))


@gluon.jit
def load_queries(queries, memory, stage, phase, turn, row, PART: gl.constexpr, CFG: gl.constexpr):
    """Load one part of 64 rows of q into a pipeline stage; return the next stage and its phase.

    Args:
        queries: TMA descriptor of q ``[rows · heads, elements]``, in boxes of this part.
        turn: parity of the number of earlier requests.
        row: first packed row in the batch.
        PART: 0 for the left half of the value part, 1 for the right half, 2 for the rest.
    """
    full = full_barrier(memory, PART, stage, CFG)
    if CFG.RAW_CHUNKS > 0:
        mbarrier.wait(query_barrier(memory, PART, CFG), turn ^ 1)
    else:
        mbarrier.wait(empty_barrier(memory, PART, stage, CFG), phase ^ 1)
    mbarrier.expect(full, query_bytes(CFG, PART == 2))
    if PART == 2:
        load_query_part(queries, memory.rests.index(stage), full, row, CFG.VALUE_DIM, CFG.REST_DIM, CFG)
    else:
        for chunk in gl.static_range(num_chunks(CFG)):
            load_query_part(
                queries, tile_of(memory, PART, chunk, stage, CFG), full, row,
                PART * half_width(CFG) + chunk * chunk_width(CFG), chunk_width(CFG), CFG,
            )  # fmt: skip
    return advance(stage, phase, CFG.REST_STAGES if PART == 2 else CFG.STAGES)


@gluon.jit
def load_stage(source, memory, stage, phase, places, PART: gl.constexpr, CFG: gl.constexpr):
    """Load one part of a key tile into its stage."""
    full = full_barrier(memory, PART, stage, CFG)
    mbarrier.wait(empty_barrier(memory, PART, stage, CFG), phase ^ 1)
    mbarrier.expect(full, part_bytes(CFG, PART == 2))
    if PART == 2:
        load_part(source, memory.rests.index(stage), full, places, 0, CFG.REST_DIM, CFG)
    else:
        for chunk in gl.static_range(num_chunks(CFG)):
            load_part(
                source, tile_of(memory, PART, chunk, stage, CFG), full, places,
                PART * half_width(CFG) + chunk * chunk_width(CFG), chunk_width(CFG), CFG,
            )  # fmt: skip


@gluon.jit
def load_raw(source, memory, number, places, PART: gl.constexpr, CFG: gl.constexpr):
    """Load one part of a key tile in e4m3, before a value warp group upcasts it into a stage."""
    for chunk in gl.static_range(1 if PART == 2 else num_chunks(CFG)):
        slot, phase = raw_slot(number, PART, chunk, CFG)
        full = raw_full_barrier(memory, slot, CFG)
        mbarrier.wait(raw_empty_barrier(memory, slot, CFG), phase ^ 1)
        if PART == 2:
            mbarrier.expect(full, CFG.BLOCK_N * CFG.REST_DIM)
            load_part(source, memory.raw_rests.index(number & 1), full, places, 0, CFG.REST_DIM, CFG)
        else:
            mbarrier.expect(full, CFG.BLOCK_N * chunk_width(CFG))
            load_part(
                source, memory.raws.index(slot), full, places, PART * half_width(CFG) + chunk * chunk_width(CFG),
                chunk_width(CFG), CFG,
            )  # fmt: skip


@gluon.jit
def load_latent_tiles(
    source, memory, state, page_row, first, stop, first_key, kv_len, num_pages, PART: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Load one part of key tiles [first, stop) of one request; return the next state.

    Args:
        source: TMA descriptor of the value part or of the rest of the rows.
        state: next stage and its phase, and the number of key tiles so far.
        PART: as in `load_queries`.
    """
    stage, phase, number = state
    for tile in range(first, stop):
        places = ()
        for b in gl.static_range(CFG.BLOCK_N // CFG.BOX_KEYS):
            place = locate_box(page_row, tile, b, first_key, kv_len, num_pages, CFG)
            places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005
        if CFG.RAW_CHUNKS > 0:
            load_raw(source, memory, number, places, PART, CFG)
        else:
            load_stage(source, memory, stage, phase, places, PART, CFG)
        stage, phase = advance(stage, phase, CFG.REST_STAGES if PART == 2 else CFG.STAGES)
        number += 1
    return stage, phase, number
