"""The fetching roles: one warp brings K, one brings V, in boxes of a page or of a part of one.

Four pages of 16 fill a tile of 64 keys as one page of 64 does. A box has 128 bytes of a head, or all 256 of it: half as
many boxes. Two warps, because what a tile of small pages takes to ask for are instructions that the folding warps of
one scheduler wait for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .constants import first_of, parts_of, spread_of, width_of
from .names import async_load, reinterpret
from .ring import next_slot

KEYS, VALUES, WIDENED, GATHERED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
"""What a role brings: boxes of K, boxes of V, both as wide as rows from a ring of narrow ones, or keys one by one."""
LONE_REGISTERS, FETCH_REGISTERS, CROWDED_REGISTERS = gl.constexpr(24), gl.constexpr(40), gl.constexpr(32)
"""Of a fetching thread beside one folding group, which has the rest; beside two, or a widening one; beside three."""
WIDEN_REGISTERS = gl.constexpr(96)
"""Of a widening thread."""


@gluon.constexpr_function
def leads(what):
    """Whether a role is the first to ask for a tile: the one that takes a program's work."""
    return what in (KEYS.value, GATHERED.value)


@gluon.jit
def fetch_tiles(
    source, ring, slot, phase, page_row, head, first, stop, kv_len, num_pages, WHAT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Bring K, or V, of tiles [first, stop) of one request.

    Args:
        source: descriptors of boxes of a page, or of a part of one; and others of the same tensor: of C.BOX keys where
            heads come whole, of a tile's other columns where it has two parts, or None.
    """
    full = gl.minimum(gl.maximum(kv_len // C.BLOCK_N, first), stop)
    slot, phase = fetch_boxes(source, ring, slot, phase, page_row, head, first, full, kv_len, num_pages, WHAT, True, C)
    return fetch_boxes(source, ring, slot, phase, page_row, head, full, stop, kv_len, num_pages, WHAT, False, C)


@gluon.constexpr_function
def keys_of(box):
    """Keys of a box: ``[1, keys, 1, 128 bytes]``, or of whole heads ``[1, keys / 8, 2, 8, 128 bytes]``."""
    return box[1] if len(box) == 4 else box[1] * box[3]


@gluon.jit
def fetch_boxes(
    source, ring, slot, phase, page_row, head, first, stop, kv_len, num_pages, WHAT: gl.constexpr, FULL: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """FULL: tiles that are full of keys; of others, boxes behind the last key bring zeros and no bytes."""
    boxes, others = source
    tiles, full, free = ring.v if WHAT == VALUES else ring.k
    KEYS_OF_BOX: gl.constexpr = keys_of(boxes.block_shape)
    BOXES: gl.constexpr = C.BLOCK_N // KEYS_OF_BOX
    BYTES: gl.constexpr = C.BLOCK_N * (C.BLOCK_D + C.REST) * boxes.dtype.primitive_bitwidth // 8
    for tile in range(first, stop):
        # Before the wait, so that page ids travel while the ring is full.
        pages = ()
        for b in gl.static_range(BOXES):
            position = tile * C.BLOCK_N + b * KEYS_OF_BOX
            if FULL:
                page = gl.load(page_row + position // C.PAGE)
            else:
                here = position < kv_len
                page = gl.where(here, gl.load(page_row + gl.where(here, position // C.PAGE, 0)), num_pages)
            pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        for b in gl.static_range(BOXES):
            left = kv_len - tile * C.BLOCK_N - b * KEYS_OF_BOX
            at = pages[b], (tile * C.BLOCK_N + b * KEYS_OF_BOX) % C.PAGE, head
            room = tiles[0].index(slot)
            if others is None or C.REST > 0:
                ask_for_columns(boxes, room, full.index(slot), b, at, left, 0, FULL, C)
            else:
                ask_for_heads(boxes, others, room, full.index(slot), b, at, left, FULL, C)
            if C.REST > 0:
                ask_for_columns(others, tiles[1].index(slot), full.index(slot), b, at, left, 1, FULL, C)
        slot, phase = next_slot(slot, phase, C.DEPTH)
    return slot, phase


@gluon.jit
def ask_for_columns(
    boxes, room, full, b: gl.constexpr, at, left, part: gl.constexpr, FULL: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Box b of a part of a tile, at most 128 bytes of a head at a time; one that is not full of keys ends with the last
    of them.
    """
    page, row, head = at
    BOXES: gl.constexpr = C.BLOCK_N // C.BOX
    WIDTH: gl.constexpr = boxes.block_shape[3]
    TIMES: gl.constexpr = width_of(C, part) // WIDTH
    rooms = reinterpret(room, boxes.dtype, [TIMES * BOXES, 1, C.BOX, 1, WIDTH], boxes.layout)
    if not FULL:
        row += gl.minimum(left, C.BOX) - C.BOX
    for i in gl.static_range(TIMES):
        async_load(boxes, [page, row, head, first_of(C, part) + i * WIDTH], full, rooms.index(i * BOXES + b))


@gluon.jit
def ask_for_heads(boxes, edges, room, full, b: gl.constexpr, at, left, FULL: gl.constexpr, C: gl.constexpr):
    """Box b of a tile, whole heads; one that is not full of keys comes as boxes of C.BOX, of which one that is not full
    ends with the last key: what lies before the 8 keys that it begins in reads as zeros, all of it behind the last key.
    """
    page, row, head = at
    GROUPS: gl.constexpr = boxes.block_shape[1]
    PARTS: gl.constexpr = boxes.block_shape[2]
    WIDTH: gl.constexpr = boxes.block_shape[4]
    BOXES: gl.constexpr = C.BLOCK_N // C.BOX // GROUPS
    group = row // C.BOX
    rooms = reinterpret(room, boxes.dtype, [BOXES, 1, GROUPS, PARTS, C.BOX, WIDTH], boxes.layout)
    if FULL:
        async_load(boxes, [page, group, head * PARTS, 0, 0], full, rooms.index(b))
    else:
        inside = left >= GROUPS * C.BOX
        async_load(boxes, [page, group, head * PARTS, 0, 0], full, rooms.index(b), pred=inside)
        own = reinterpret(room, boxes.dtype, [BOXES * GROUPS, 1, 1, PARTS, C.BOX, WIDTH], edges.layout)
        for g in gl.static_range(GROUPS):
            before = gl.minimum(left - g * C.BOX, C.BOX) - C.BOX
            async_load(
                edges, [page, group + g, head * PARTS, before, 0], full, own.index(b * GROUPS + g), pred=inside == 0
            )  # fmt: skip


@gluon.jit
def widened(x, dtype: gl.constexpr):
    """e4m3 to `dtype`, exactly. To bf16 by moving the bits, four at a time: exponents are 120 too small afterwards,
    which a product with 2**120 makes up for, for subnormals too. e4m3's NaN becomes 480.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high, sign, factor;
                mov.b32 factor, 0x7B807B80;
                prmt.b32 low, $2, 0, 0x1404;
                prmt.b32 high, $2, 0, 0x3424;
                and.b32 sign, low, 0x80008000;
                shr.b32 low, low, 4;
                lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
                mul.rn.bf16x2 $0, low, factor;
                and.b32 sign, high, 0x80008000;
                shr.b32 high, high, 4;
                lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
                mul.rn.bf16x2 $1, high, factor;
            }
            """,
            "=r,=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return x.to(dtype)


@gluon.jit
def widen_tile(narrow, near, near_phase, wide, slot, phase, C: gl.constexpr):
    """Bring K, or V, of one tile to the rows' dtype, from a half of one ring to that of another.

    A narrow tile is left when what was read of it has been written: a barrier says nothing of loads that are under way,
    and products that take all of shared memory's bandwidth can hold them up for longer than the copy engine takes.
    """
    mbarrier.wait(narrow.full.index(near), near_phase)
    brought = ()
    for part in gl.static_range(parts_of(C)):
        # Eight threads write one row of 128 bytes: 16 values a thread would put two of them on each bank.
        x = narrow.tiles[part].index(near).load(spread_of(width_of(C, part), gl.num_warps()))
        brought = brought + (widened(x, wide.tiles[part].dtype),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(wide.free.index(slot), phase ^ 1)
    for part in gl.static_range(parts_of(C)):
        wide.tiles[part].index(slot).store(brought[part])
    fence_async_shared()
    mbarrier.arrive(wide.full.index(slot), count=1)
    mbarrier.arrive(narrow.free.index(near), count=1)


@gluon.jit
def widen_tiles(narrow, ring, near, near_phase, slot, phase, first, stop, C: gl.constexpr):
    """Bring e4m3 tiles [first, stop) to the rows' dtype: once a tile, whatever the number of rows."""
    for _ in range(first, stop):
        widen_tile(narrow.k, near, near_phase, ring.k, slot, phase, C)
        widen_tile(narrow.v, near, near_phase, ring.v, slot, phase, C)
        near, near_phase = next_slot(near, near_phase, C.DEPTH)
        slot, phase = next_slot(slot, phase, C.STAGES)
    return near, near_phase, slot, phase
