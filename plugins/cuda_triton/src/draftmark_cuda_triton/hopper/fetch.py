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


@gluon.constexpr_function
def keys_of(box):
    """Keys of a box: ``[1, keys, 1, 128 bytes]``, or of whole heads ``[1, keys / 8, 2, 8, 128 bytes]``."""
    return box[1] if len(box) == 4 else box[1] * box[3]


@gluon.constexpr_function
def bytes_of(C, dtype):
    """Bytes of a tile, of all its columns."""
    return C.BLOCK_N * (C.BLOCK_D + C.REST) * dtype.primitive_bitwidth // 8


@gluon.constexpr_function
def unrolls(C, boxes):
    """Whether a tile's boxes are asked for one behind the other, in code of their own each.

    Not beside two folding groups or three, whose loops fill the cache of instructions: there a loop that is read again
    and again takes less of their time than as many instructions, or fewer, that are read once a tile (NOTES.md).
    """
    return C.MEMBERS == 1 or boxes <= 2


@gluon.constexpr_function
def at_once(C):
    """Boxes that are asked for together where they are not all: one beside two groups, whom short code with waits in
    between holds up least. Three fold a tile of narrow heads in less time than as many waits take.
    """
    return 1 if C.MEMBERS == 2 else 2


@gluon.jit
def fetch_tiles(
    source, ring, slot, phase, page_row, head, first, stop, kv_len, num_pages, WHAT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Bring K, or V, of tiles [first, stop) of one request.

    Args:
        source: descriptors of boxes of a page, or of a part of one; and others of the same tensor: of C.BOX keys where
            heads come whole, of a tile's other columns where it has two parts, or None.
    """
    half = ring.v if WHAT == VALUES else ring.k
    if unrolls(C, C.BLOCK_N // keys_of(source[0].block_shape)):
        full = gl.minimum(gl.maximum(kv_len // C.BLOCK_N, first), stop)
        slot, phase = fetch_full(source, half, slot, phase, page_row, head, first, full, C)
        slot, phase = fetch_few(source, half, slot, phase, page_row, head, full, stop, kv_len, num_pages, 1, C)
    else:
        few: gl.constexpr = at_once(C)
        slot, phase = fetch_few(source, half, slot, phase, page_row, head, first, stop, kv_len, num_pages, few, C)
    return slot, phase


@gluon.jit
def fetch_full(source, half, slot, phase, page_row, head, first, stop, C: gl.constexpr):
    """Tiles that are full of keys, the boxes of each at once."""
    tiles, full, free = half
    KEYS_OF_BOX: gl.constexpr = keys_of(source[0].block_shape)
    BOXES: gl.constexpr = C.BLOCK_N // KEYS_OF_BOX
    for tile in range(first, stop):
        # Before the wait, so that page ids travel while the ring is full.
        pages = ()
        for b in gl.static_range(BOXES):
            page = gl.load(page_row + (tile * C.BLOCK_N + b * KEYS_OF_BOX) // C.PAGE)
            pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), bytes_of(C, source[0].dtype))
        for b in gl.static_range(BOXES):
            at = pages[b], (tile * C.BLOCK_N + b * KEYS_OF_BOX) % C.PAGE, head
            ask_for_box(source, tiles, slot, full, b, at, C)
        slot, phase = next_slot(slot, phase, C.DEPTH)
    return slot, phase


@gluon.jit
def fetch_few(
    source, half, slot, phase, page_row, head, first, stop, kv_len, num_pages, AT_ONCE: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Tiles that need not be full of keys: AT_ONCE full boxes at a time, and what is left one by one."""
    tiles, full, free = half
    KEYS_OF_BOX: gl.constexpr = keys_of(source[0].block_shape)
    BOXES: gl.constexpr = C.BLOCK_N // KEYS_OF_BOX
    for tile in range(first, stop):
        begin = tile * C.BLOCK_N
        whole = gl.minimum((kv_len - begin) // KEYS_OF_BOX, BOXES)
        mbarrier.wait(free.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), bytes_of(C, source[0].dtype))
        ids = page_row + begin // KEYS_OF_BOX
        for time in range(0, whole // AT_ONCE):
            pages = ()
            for i in gl.static_range(AT_ONCE):
                position = begin + (time * AT_ONCE + i) * KEYS_OF_BOX
                # A box a page is the usual case, and needs no division.
                page = gl.load(ids + i if C.PAGE == KEYS_OF_BOX else page_row + position // C.PAGE)
                pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
            ids += AT_ONCE
            for i in gl.static_range(AT_ONCE):
                b = time * AT_ONCE + i
                at = pages[i], (begin + b * KEYS_OF_BOX) % C.PAGE, head
                ask_for_box(source, tiles, slot, full, b, at, C)
        if whole % AT_ONCE > 0:
            position = begin + (whole - 1) * KEYS_OF_BOX
            at = gl.load(page_row + position // C.PAGE), position % C.PAGE, head
            ask_for_box(source, tiles, slot, full, whole - 1, at, C)
        if whole < BOXES:
            ask_for_rest(source, tiles, slot, full, whole, begin, page_row, head, kv_len, num_pages, C)
        slot, phase = next_slot(slot, phase, C.DEPTH)
    return slot, phase


@gluon.jit
def ask_for_box(source, tiles, slot, full, b, at, C: gl.constexpr):
    """Box b of a tile, full of keys, all of its columns.

    Args:
        at: its page, the page's row where it begins, and the head.
    """
    boxes, others = source
    if others is None or C.REST > 0:
        ask_for_columns(source, tiles, slot, full, b, at, C)
    else:
        page, row, head = at
        at_page = [page, row // C.BOX, head * boxes.block_shape[2], 0, 0]
        async_load(boxes, at_page, full.index(slot), rooms_of_heads(boxes, tiles[0].index(slot), C).index(b))


@gluon.jit
def ask_for_rest(source, tiles, slot, full, b, begin, page_row, head, kv_len, num_pages, C: gl.constexpr):
    """Box b of a tile, which is not full, and those behind it. One that has keys ends with the last of them; those
    behind bring zeros and no bytes.

    Of whole heads one that has keys comes as boxes of C.BOX, and each of those ends with the last key, or its own last:
    what lies before the 8 keys that the last one begins in reads as zeros, all of it behind the last key.
    """
    boxes, others = source
    KEYS_OF_BOX: gl.constexpr = keys_of(boxes.block_shape)
    BOXES: gl.constexpr = C.BLOCK_N // KEYS_OF_BOX
    position = begin + b * KEYS_OF_BOX
    keys = kv_len - position
    page = gl.load(page_row + position // C.PAGE, mask=keys > 0, other=num_pages)
    if others is None or C.REST > 0:
        at = page, position % C.PAGE + gl.maximum(keys, 0) - C.BOX, head
        ask_for_columns(source, tiles, slot, full, b, at, C)
    else:
        PARTS: gl.constexpr = boxes.block_shape[2]
        GROUPS: gl.constexpr = KEYS_OF_BOX // C.BOX
        room = tiles[0].index(slot)
        # Of a known number of turns the compiler writes each out, which a lone group leaves room for; the bound that
        # never binds keeps a loop.
        end = (b + 1) * GROUPS
        if C.MEMBERS > 1:
            end = gl.minimum(end, BOXES * GROUPS)
        for g in range(b * GROUPS, end):
            before = gl.minimum(kv_len - begin - g * C.BOX, C.BOX) - C.BOX
            at_group = [page, (begin + g * C.BOX) % C.PAGE // C.BOX, head * PARTS, before, 0]
            async_load(others, at_group, full.index(slot), rooms_of_heads(others, room, C).index(g))
    for after in range(b + 1, BOXES):
        ask_for_box(source, tiles, slot, full, after, (num_pages, 0, head), C)


@gluon.jit
def ask_for_columns(source, tiles, slot, full, b, at, C: gl.constexpr):
    """Box b of each part of a tile."""
    for part in gl.static_range(parts_of(C)):
        ask_for_part(source[part], tiles[part].index(slot), full.index(slot), b, at, part, C)


@gluon.jit
def ask_for_part(boxes, room, full, b, at, part: gl.constexpr, C: gl.constexpr):
    """Box b of a part of a tile, at most 128 bytes of a head at a time."""
    page, row, head = at
    BOXES: gl.constexpr = C.BLOCK_N // C.BOX
    WIDTH: gl.constexpr = boxes.block_shape[3]
    TIMES: gl.constexpr = width_of(C, part) // WIDTH
    rooms = reinterpret(room, boxes.dtype, [TIMES * BOXES, 1, C.BOX, 1, WIDTH], boxes.layout)
    for i in gl.static_range(TIMES):
        async_load(boxes, [page, row, head, first_of(C, part) + i * WIDTH], full, rooms.index(i * BOXES + b))


@gluon.jit
def rooms_of_heads(boxes, room, C: gl.constexpr):
    """A tile's slot as places of boxes of whole heads."""
    GROUPS: gl.constexpr = boxes.block_shape[1]
    PARTS: gl.constexpr = boxes.block_shape[2]
    WIDTH: gl.constexpr = boxes.block_shape[4]
    shape: gl.constexpr = [C.BLOCK_N // C.BOX // GROUPS, 1, GROUPS, PARTS, C.BOX, WIDTH]
    return reinterpret(room, boxes.dtype, shape, boxes.layout)


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
