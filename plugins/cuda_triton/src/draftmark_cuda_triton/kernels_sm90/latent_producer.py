"""TMA producer of latent rows: one warp loads the rest and the left half of the values, another the right half.

A tile has up to three parts with a barrier each, so a product starts when its own part has arrived, and a part is
loaded again as soon as its last product has ended.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import reinterpret, tma_load
from .latent_config import chunk_width, half_width, num_chunks, part_bytes
from .pipeline import advance


@gluon.jit
def locate_box(page_row, tile, b: gl.constexpr, first_key, kv_len, num_pages, CFG: gl.constexpr):
    """Return the page id and the first row of box b of a tile; the box ends with the request's last key (`mask`).

    For the page id `num_pages`, which is out of range, TMA writes zeros. Boxes without a key of the request, and boxes
    before the window in pages that another request may own, have this id (`producer_tma.load_page_id`).
    """
    position = tile * CFG.BLOCK_N + b * CFG.BOX_KEYS
    keys = gl.minimum(kv_len - position, CFG.BOX_KEYS)
    is_loaded = keys > 0
    if CFG.WINDOW and CFG.PAGE_SIZE % CFG.BLOCK_N != 0:
        is_loaded = is_loaded & (position + CFG.BOX_KEYS > first_key)
    page = gl.load(page_row + position // CFG.PAGE_SIZE, mask=is_loaded, other=num_pages)
    return page, position % CFG.PAGE_SIZE + gl.maximum(keys, 0) - CFG.BOX_KEYS


@gluon.jit
def load_part(boxes, smem, full, places, column: gl.constexpr, width: gl.constexpr, CFG: gl.constexpr):
    """Issue the boxes of one part of a tile; a box has at most 128 bytes of each key.

    Args:
        places: page id and first row of each box, from `locate_box`.
        column, width: first column of the part in the tensor, and its number of columns.
    """
    BOXES: gl.constexpr = CFG.BLOCK_N // CFG.BOX_KEYS
    BOX_WIDTH: gl.constexpr = boxes.block_shape[3]
    TIMES: gl.constexpr = width // BOX_WIDTH
    views = reinterpret(smem, boxes.dtype, [TIMES * BOXES, 1, CFG.BOX_KEYS, 1, BOX_WIDTH], boxes.layout)
    for b in gl.static_range(BOXES):
        page, row = places[b]
        for i in gl.static_range(TIMES):
            tma_load(boxes, [page, row, 0, column + i * BOX_WIDTH], full, views.index(i * BOXES + b))


@gluon.jit
def load_latent_tiles(
    values, rests, pipeline, state, page_row, first, stop, first_key, kv_len, num_pages, HALF: gl.constexpr,
    CFG: gl.constexpr,
):  # fmt: skip
    """Load one half of the values of key tiles [first, stop) of one request, and with HALF 0 the rest too.

    Args:
        values, rests: TMA descriptors of both parts of the rows; `rests` is None if rows have no rest.
        state: stage and phase of the pipeline; the function returns them advanced.
    """
    stage, phase = state
    half, rest = pipeline.halves[HALF], pipeline.rest
    for tile in range(first, stop):
        places = ()
        for b in gl.static_range(CFG.BLOCK_N // CFG.BOX_KEYS):
            place = locate_box(page_row, tile, b, first_key, kv_len, num_pages, CFG)
            places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005
        if CFG.REST_DIM > 0 and HALF == 0:
            mbarrier.wait(rest.empty.index(stage), phase ^ 1)
            mbarrier.expect(rest.full.index(stage), part_bytes(CFG, True))
            load_part(rests, rest.tiles[0].index(stage), rest.full.index(stage), places, 0, CFG.REST_DIM, CFG)
        mbarrier.wait(half.empty.index(stage), phase ^ 1)
        mbarrier.expect(half.full.index(stage), part_bytes(CFG, False))
        for chunk in gl.static_range(num_chunks(CFG)):
            load_part(
                values, half.tiles[chunk].index(stage), half.full.index(stage), places,
                HALF * half_width(CFG) + chunk * chunk_width(CFG), chunk_width(CFG), CFG,
            )  # fmt: skip
        stage, phase = advance(stage, phase, CFG.STAGES)
    return stage, phase
