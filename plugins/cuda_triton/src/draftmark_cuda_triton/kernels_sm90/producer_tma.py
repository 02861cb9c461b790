"""TMA producer: one warp loads K, another loads V, in boxes of at most one page.

Four pages of 16 fill a tile of 64 keys, as one page of 64 does. A box holds 128 bytes of each key's head. A full-head
box holds all 256 bytes, which halves the number of boxes. K and V have a warp each, because issuing the boxes of small
pages takes many instructions, which delay the consumer warps on the same warp scheduler.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .config import LOAD_V, num_column_parts, part_offset, part_width
from .gluon_compat import reinterpret, tma_load
from .pipeline import advance


@gluon.constexpr_function
def box_keys(box):
    """Return the number of keys in a TMA box.

    Its shape is ``[1, keys, 1, 128 bytes]``, or for a full-head box ``[1, keys / 8, 2, 8, 128 bytes]``.
    """
    return box[1] if len(box) == 4 else box[1] * box[3]


@gluon.constexpr_function
def tile_bytes(CFG, dtype):
    """Return the number of bytes of a tile, with all its column parts."""
    return CFG.BLOCK_N * (CFG.BLOCK_D + CFG.BLOCK_D_REST) * dtype.primitive_bitwidth // 8


@gluon.constexpr_function
def unrolls_boxes(CFG, boxes):
    """Return True if the boxes of a full tile are issued by unrolled code instead of a loop.

    The mainloops of two or three consumer warp groups fill the instruction cache. A short producer loop then slows them
    less than unrolled code, which is fetched again for every tile (NOTES.md).
    """
    return CFG.NUM_CONSUMER_WGS == 1 or boxes <= 2


@gluon.constexpr_function
def boxes_per_batch(CFG):
    """Return the number of boxes that one iteration of the producer loop issues.

    One box an iteration (short code, with waits in between) delays two consumer warp groups least. Three groups with
    small heads process a tile faster than a producer that waits for each box's page id can load it. So two boxes share
    one wait.
    """
    return 1 if CFG.NUM_CONSUMER_WGS == 2 else 2


@gluon.jit
def load_tiles(
    descriptors, pipeline, stage, phase, page_table_row, head, first, stop, first_key, kv_len, num_pages,
    ROLE: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Load the K tiles, or with ROLE LOAD_V the V tiles, [first, stop) of one request.

    Args:
        first_key: first key that a row of the request sees under its window.
        descriptors: two TMA descriptors of one tensor. The first has boxes of one page, or of a part of a page. With
            full-head boxes, the second has boxes of CFG.BOX_KEYS keys. If the tile has two column parts, it has boxes
            of the second part. Otherwise it is None.
    """
    tensor_pipeline = pipeline.v if ROLE == LOAD_V else pipeline.k
    if unrolls_boxes(CFG, CFG.BLOCK_N // box_keys(descriptors[0].block_shape)):
        full = gl.minimum(gl.maximum(kv_len // CFG.BLOCK_N, first), stop)
        stage, phase = load_full_tiles(
            descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, full, first_key, num_pages, CFG
        )
        stage, phase = load_partial_tiles(
            descriptors, tensor_pipeline, stage, phase, page_table_row, head, full, stop, first_key, kv_len, num_pages,
            1, CFG
        )  # fmt: skip
    else:
        batch: gl.constexpr = boxes_per_batch(CFG)
        stage, phase = load_partial_tiles(
            descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, stop, first_key, kv_len, num_pages,
            batch, CFG
        )  # fmt: skip
    return stage, phase


@gluon.jit
def load_page_id(entry, position, first_key, num_pages, KEYS_OF_BOX: gl.constexpr, CFG: gl.constexpr):
    """Load the page id of a full box at this position from its table entry; `num_pages` left of the window.

    Pages left of the window (before `first_key`) may belong to another request and contain NaN. For the page id
    `num_pages`, which is out of range, TMA writes zeros and reads nothing. If a tile lies in one page, that page also
    holds a visible key, so the request still owns it.
    """
    if CFG.WINDOW and CFG.PAGE_SIZE % CFG.BLOCK_N != 0:
        return gl.load(entry, mask=position + KEYS_OF_BOX > first_key, other=num_pages)
    else:
        return gl.load(entry)


@gluon.jit
def load_full_tiles(
    descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, stop, first_key, num_pages,
    CFG: gl.constexpr
):  # fmt: skip
    """Load tiles that are full of keys; all boxes of a tile are issued by unrolled code."""
    tiles, full, empty = tensor_pipeline
    KEYS_OF_BOX: gl.constexpr = box_keys(descriptors[0].block_shape)
    BOXES: gl.constexpr = CFG.BLOCK_N // KEYS_OF_BOX
    for tile in range(first, stop):
        # The page ids are loaded before the wait for an empty stage, so their latency overlaps that wait.
        pages = ()
        for b in gl.static_range(BOXES):
            position = tile * CFG.BLOCK_N + b * KEYS_OF_BOX
            entry = page_table_row + position // CFG.PAGE_SIZE
            page = load_page_id(entry, position, first_key, num_pages, KEYS_OF_BOX, CFG)
            pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), tile_bytes(CFG, descriptors[0].dtype))
        for b in gl.static_range(BOXES):
            at = pages[b], (tile * CFG.BLOCK_N + b * KEYS_OF_BOX) % CFG.PAGE_SIZE, head
            issue_box(descriptors, tiles, stage, full, b, at, CFG)
        stage, phase = advance(stage, phase, CFG.FP8_STAGES)
    return stage, phase


@gluon.jit
def load_partial_tiles(
    descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, stop, first_key, kv_len, num_pages,
    BOXES_PER_BATCH: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Load tiles that are possibly not full: BOXES_PER_BATCH full boxes an iteration, then the rest one at a time."""
    tiles, full, empty = tensor_pipeline
    KEYS_OF_BOX: gl.constexpr = box_keys(descriptors[0].block_shape)
    BOXES: gl.constexpr = CFG.BLOCK_N // KEYS_OF_BOX
    for tile in range(first, stop):
        begin = tile * CFG.BLOCK_N
        full_boxes = gl.minimum((kv_len - begin) // KEYS_OF_BOX, BOXES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), tile_bytes(CFG, descriptors[0].dtype))
        ids = page_table_row + begin // KEYS_OF_BOX
        for batch in range(0, full_boxes // BOXES_PER_BATCH):
            pages = ()
            for i in gl.static_range(BOXES_PER_BATCH):
                position = begin + (batch * BOXES_PER_BATCH + i) * KEYS_OF_BOX
                # If a page is exactly one box, which is usual, the page index needs no division.
                entry = ids + i if CFG.PAGE_SIZE == KEYS_OF_BOX else page_table_row + position // CFG.PAGE_SIZE
                page = load_page_id(entry, position, first_key, num_pages, KEYS_OF_BOX, CFG)
                pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
            ids += BOXES_PER_BATCH
            for i in gl.static_range(BOXES_PER_BATCH):
                b = batch * BOXES_PER_BATCH + i
                at = pages[i], (begin + b * KEYS_OF_BOX) % CFG.PAGE_SIZE, head
                issue_box(descriptors, tiles, stage, full, b, at, CFG)
        if full_boxes % BOXES_PER_BATCH > 0:
            position = begin + (full_boxes - 1) * KEYS_OF_BOX
            entry = page_table_row + position // CFG.PAGE_SIZE
            page = load_page_id(entry, position, first_key, num_pages, KEYS_OF_BOX, CFG)
            at = page, position % CFG.PAGE_SIZE, head
            issue_box(descriptors, tiles, stage, full, full_boxes - 1, at, CFG)
        if full_boxes < BOXES:
            issue_last_boxes(
                descriptors, tiles, stage, full, full_boxes, begin, page_table_row, head, kv_len, num_pages, CFG
            )
        stage, phase = advance(stage, phase, CFG.FP8_STAGES)
    return stage, phase


@gluon.jit
def issue_box(descriptors, tiles, stage, full, b, at, CFG: gl.constexpr):
    """Issue the loads of box b of a tile, a box full of keys, for all columns.

    Args:
        at: page id, first token of the box within the page, KV head.
    """
    boxes, extra = descriptors
    if extra is None or CFG.BLOCK_D_REST > 0:
        issue_column_boxes(descriptors, tiles, stage, full, b, at, CFG)
    else:
        page, row, head = at
        at_page = [page, row // CFG.BOX_KEYS, head * boxes.block_shape[2], 0, 0]
        tma_load(boxes, at_page, full.index(stage), box_views(boxes, tiles[0].index(stage), CFG).index(b))


@gluon.jit
def issue_last_boxes(
    descriptors, tiles, stage, full, b, begin, page_table_row, head, kv_len, num_pages, CFG: gl.constexpr
):
    """Issue box b of a tile, which is not full, and all boxes after it.

    If box b has keys, it ends with the request's last key. Boxes after it name a page out of range, so TMA writes zeros
    and reads nothing. With full-head boxes, box b is loaded as smaller boxes of CFG.BOX_KEYS keys. Each ends with the
    request's last key or its own last key. TMA writes zeros for coordinates before the first row, so nothing after the
    last key is read.
    """
    boxes, extra = descriptors
    KEYS_OF_BOX: gl.constexpr = box_keys(boxes.block_shape)
    BOXES: gl.constexpr = CFG.BLOCK_N // KEYS_OF_BOX
    position = begin + b * KEYS_OF_BOX
    keys = kv_len - position
    page = gl.load(page_table_row + position // CFG.PAGE_SIZE, mask=keys > 0, other=num_pages)
    if extra is None or CFG.BLOCK_D_REST > 0:
        at = page, position % CFG.PAGE_SIZE + gl.maximum(keys, 0) - CFG.BOX_KEYS, head
        issue_column_boxes(descriptors, tiles, stage, full, b, at, CFG)
    else:
        PARTS: gl.constexpr = boxes.block_shape[2]
        GROUPS: gl.constexpr = KEYS_OF_BOX // CFG.BOX_KEYS
        smem = tiles[0].index(stage)
        # The compiler unrolls a loop of constant length. With one consumer warp group there is room for that code. With
        # more groups, a minimum that never changes `end` hides the constant, so the loop is not unrolled.
        end = (b + 1) * GROUPS
        if CFG.NUM_CONSUMER_WGS > 1:
            end = gl.minimum(end, BOXES * GROUPS)
        for g in range(b * GROUPS, end):
            before = gl.minimum(kv_len - begin - g * CFG.BOX_KEYS, CFG.BOX_KEYS) - CFG.BOX_KEYS
            at_group = [page, (begin + g * CFG.BOX_KEYS) % CFG.PAGE_SIZE // CFG.BOX_KEYS, head * PARTS, before, 0]
            tma_load(extra, at_group, full.index(stage), box_views(extra, smem, CFG).index(g))
    for after in range(b + 1, BOXES):
        issue_box(descriptors, tiles, stage, full, after, (num_pages, 0, head), CFG)


@gluon.jit
def issue_column_boxes(descriptors, tiles, stage, full, b, at, CFG: gl.constexpr):
    """Issue box b of every column part of a tile."""
    for part in gl.static_range(num_column_parts(CFG)):
        issue_part_boxes(descriptors[part], tiles[part].index(stage), full.index(stage), b, at, part, CFG)


@gluon.jit
def issue_part_boxes(boxes, smem, full, b, at, part: gl.constexpr, CFG: gl.constexpr):
    """Issue box b of one column part, at most 128 bytes of a head a load."""
    page, row, head = at
    BOXES: gl.constexpr = CFG.BLOCK_N // CFG.BOX_KEYS
    WIDTH: gl.constexpr = boxes.block_shape[3]
    TIMES: gl.constexpr = part_width(CFG, part) // WIDTH
    views = reinterpret(smem, boxes.dtype, [TIMES * BOXES, 1, CFG.BOX_KEYS, 1, WIDTH], boxes.layout)
    for i in gl.static_range(TIMES):
        tma_load(boxes, [page, row, head, part_offset(CFG, part) + i * WIDTH], full, views.index(i * BOXES + b))


@gluon.jit
def box_views(boxes, smem, CFG: gl.constexpr):
    """Return a stage's tile reinterpreted as an array of full-head boxes."""
    GROUPS: gl.constexpr = boxes.block_shape[1]
    PARTS: gl.constexpr = boxes.block_shape[2]
    WIDTH: gl.constexpr = boxes.block_shape[4]
    shape: gl.constexpr = [CFG.BLOCK_N // CFG.BOX_KEYS // GROUPS, 1, GROUPS, PARTS, CFG.BOX_KEYS, WIDTH]
    return reinterpret(smem, boxes.dtype, shape, boxes.layout)
