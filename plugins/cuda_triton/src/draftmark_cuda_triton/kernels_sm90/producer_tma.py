"""TMA producer: one warp loads K, one loads V, in boxes of a page or of a part of one.

Four pages of 16 fill a tile of 64 keys as one page of 64 does. A box has 128 bytes of a head, or all 256 of it: half as
many boxes. Two warps, because what a tile of small pages takes to ask for are instructions that the folding warps of
one scheduler wait for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .config import LOAD_V, num_column_parts, part_offset, part_width
from .gluon_compat import reinterpret, tma_load
from .pipeline import advance


@gluon.constexpr_function
def box_keys(box):
    """Keys of a box: ``[1, keys, 1, 128 bytes]``, or of whole heads ``[1, keys / 8, 2, 8, 128 bytes]``."""
    return box[1] if len(box) == 4 else box[1] * box[3]


@gluon.constexpr_function
def tile_bytes(CFG, dtype):
    """Bytes of a tile, of all its columns."""
    return CFG.BLOCK_N * (CFG.BLOCK_D + CFG.BLOCK_D_REST) * dtype.primitive_bitwidth // 8


@gluon.constexpr_function
def unrolls_boxes(CFG, boxes):
    """Whether a tile's boxes are asked for one behind the other, in code of their own each.

    Not beside two folding groups or three, whose loops fill the cache of instructions: there a loop that is read again
    and again takes less of their time than as many instructions, or fewer, that are read once a tile (NOTES.md).
    """
    return CFG.NUM_CONSUMER_WGS == 1 or boxes <= 2


@gluon.constexpr_function
def boxes_per_batch(CFG):
    """Boxes that are asked for together where they are not all: one beside two groups, whom short code with waits in
    between holds up least. Three fold a tile of narrow heads in less time than as many waits take.
    """
    return 1 if CFG.NUM_CONSUMER_WGS == 2 else 2


@gluon.jit
def load_tiles(
    descriptors, pipeline, stage, phase, page_table_row, head, first, stop, kv_len, num_pages, ROLE: gl.constexpr,
    CFG: gl.constexpr
):  # fmt: skip
    """Bring K, or V, of tiles [first, stop) of one request.

    Args:
        descriptors: descriptors of boxes of a page, or of a part of one; and others of the same tensor: of CFG.BOX_KEYS
            keys where heads come whole, of a tile's other columns where it has two parts, or None.
    """
    tensor_pipeline = pipeline.v if ROLE == LOAD_V else pipeline.k
    if unrolls_boxes(CFG, CFG.BLOCK_N // box_keys(descriptors[0].block_shape)):
        full = gl.minimum(gl.maximum(kv_len // CFG.BLOCK_N, first), stop)
        stage, phase = load_full_tiles(
            descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, full, CFG
        )
        stage, phase = load_partial_tiles(
            descriptors, tensor_pipeline, stage, phase, page_table_row, head, full, stop, kv_len, num_pages, 1, CFG
        )
    else:
        batch: gl.constexpr = boxes_per_batch(CFG)
        stage, phase = load_partial_tiles(
            descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, stop, kv_len, num_pages, batch, CFG
        )
    return stage, phase


@gluon.jit
def load_full_tiles(descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, stop, CFG: gl.constexpr):
    """Tiles that are full of keys, the boxes of each at once."""
    tiles, full, empty = tensor_pipeline
    KEYS_OF_BOX: gl.constexpr = box_keys(descriptors[0].block_shape)
    BOXES: gl.constexpr = CFG.BLOCK_N // KEYS_OF_BOX
    for tile in range(first, stop):
        # Before the wait, so that page ids travel while the ring is full.
        pages = ()
        for b in gl.static_range(BOXES):
            page = gl.load(page_table_row + (tile * CFG.BLOCK_N + b * KEYS_OF_BOX) // CFG.PAGE_SIZE)
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
    descriptors, tensor_pipeline, stage, phase, page_table_row, head, first, stop, kv_len, num_pages,
    BOXES_PER_BATCH: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Tiles that need not be full of keys: BOXES_PER_BATCH full boxes at a time, and what is left one by one."""
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
                # A box a page is the usual case, and needs no division.
                page = gl.load(ids + i if CFG.PAGE_SIZE == KEYS_OF_BOX else page_table_row + position // CFG.PAGE_SIZE)
                pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
            ids += BOXES_PER_BATCH
            for i in gl.static_range(BOXES_PER_BATCH):
                b = batch * BOXES_PER_BATCH + i
                at = pages[i], (begin + b * KEYS_OF_BOX) % CFG.PAGE_SIZE, head
                issue_box(descriptors, tiles, stage, full, b, at, CFG)
        if full_boxes % BOXES_PER_BATCH > 0:
            position = begin + (full_boxes - 1) * KEYS_OF_BOX
            at = gl.load(page_table_row + position // CFG.PAGE_SIZE), position % CFG.PAGE_SIZE, head
            issue_box(descriptors, tiles, stage, full, full_boxes - 1, at, CFG)
        if full_boxes < BOXES:
            issue_last_boxes(
                descriptors, tiles, stage, full, full_boxes, begin, page_table_row, head, kv_len, num_pages, CFG
            )
        stage, phase = advance(stage, phase, CFG.FP8_STAGES)
    return stage, phase


@gluon.jit
def issue_box(descriptors, tiles, stage, full, b, at, CFG: gl.constexpr):
    """Box b of a tile, full of keys, all of its columns.

    Args:
        at: its page, the page's row where it begins, and the head.
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
    """Box b of a tile, which is not full, and those behind it. One that has keys ends with the last of them; those
    behind bring zeros and no bytes.

    Of whole heads one that has keys comes as boxes of CFG.BOX_KEYS, and each of those ends with the last key, or its
    own last: what lies before the 8 keys that the last one begins in reads as zeros, all of it behind the last key.
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
        # Of a known number of turns the compiler writes each out, which a lone group leaves room for; the bound that
        # never binds keeps a loop.
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
    """Box b of each part of a tile."""
    for part in gl.static_range(num_column_parts(CFG)):
        issue_part_boxes(descriptors[part], tiles[part].index(stage), full.index(stage), b, at, part, CFG)


@gluon.jit
def issue_part_boxes(boxes, smem, full, b, at, part: gl.constexpr, CFG: gl.constexpr):
    """Box b of a part of a tile, at most 128 bytes of a head at a time."""
    page, row, head = at
    BOXES: gl.constexpr = CFG.BLOCK_N // CFG.BOX_KEYS
    WIDTH: gl.constexpr = boxes.block_shape[3]
    TIMES: gl.constexpr = part_width(CFG, part) // WIDTH
    views = reinterpret(smem, boxes.dtype, [TIMES * BOXES, 1, CFG.BOX_KEYS, 1, WIDTH], boxes.layout)
    for i in gl.static_range(TIMES):
        tma_load(boxes, [page, row, head, part_offset(CFG, part) + i * WIDTH], full, views.index(i * BOXES + b))


@gluon.jit
def box_views(boxes, smem, CFG: gl.constexpr):
    """A tile's slot as places of boxes of whole heads."""
    GROUPS: gl.constexpr = boxes.block_shape[1]
    PARTS: gl.constexpr = boxes.block_shape[2]
    WIDTH: gl.constexpr = boxes.block_shape[4]
    shape: gl.constexpr = [CFG.BLOCK_N // CFG.BOX_KEYS // GROUPS, 1, GROUPS, PARTS, CFG.BOX_KEYS, WIDTH]
    return reinterpret(smem, boxes.dtype, shape, boxes.layout)
