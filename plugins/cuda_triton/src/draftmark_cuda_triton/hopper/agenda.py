"""Who works on what in EXTEND: a program that is free takes the next row tile, whichever that is.

    row_tiles  │ taken, tiles │ heads side by side, cut │ tile 0 │ tile 1 │ …   made by `kernels.schedule.write_ragged`
    program    one role takes an item (a row tile of a KV head), looks it up ──► told ──► the other roles hear it

Row tiles differ in cost: a prompt's last one sees all of its keys, the first one few. Dealt out by turns, the program
that gets the longer one of each turn ends 3 % late with 8 prompts of 4096 tokens, 27 % with one of 1024 (by count). The
role that takes is ahead by a ring of tiles, so what it looks up is there when the others ask.

    work       │ row tile, first tile of keys, length │ …         made there too, where row tiles may be CUT
    program    one role walks along the piece of one KV head ──► told ──► the other roles hear it

Of few row tiles some programs would be idle while others walk over a long prefix. Those are in one line, cut into a
piece for each program as `kernels.split` cuts requests, and merged as there, if the schedule says so.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .constants import words_of
from .names import thread_barrier
from .ring import next_slot
from .rows import apart

HEADER = gl.constexpr(4)
"""Words of `row_tiles` before the first row tile: `tiling.AGENDA_ROWS` rows of two."""
AHEAD = gl.constexpr(4)
"""Items that the role which takes them may be ahead of the others: a ring full of tiles of short requests."""


class Item(NamedTuple):
    """A row tile of a KV head, int32; there is none where it has no rows.

    Attributes:
        request, head: which.
        row, skipped: the request's row at which it begins, and how many of that row's heads are the tile's before.
        begin, rows: the request's first row, and its rows.
        prefix_len: tokens before them.
    """

    request: gl.tensor
    head: gl.tensor
    row: gl.tensor
    skipped: gl.tensor
    begin: gl.tensor
    rows: gl.tensor
    prefix_len: gl.tensor


class Span(NamedTuple):
    """What of an item's keys a program has, where row tiles may be cut, int32.

    Attributes:
        first, stop: its first tile of them, and the one past the last.
        where: 0 where those are all that it sees; else one more than the number of its place among partials.
    """

    first: gl.tensor
    stop: gl.tensor
    where: gl.tensor


@gluon.constexpr_function
def room_of(C):
    """Words that an item has room for: a power of two."""
    return 16 if C.CUT else 8


@gluon.jit
def make_agenda(HEARERS: gl.constexpr, C: gl.constexpr):
    """Room for items that were taken, and barriers that say that one is there, and that all HEARERS have it."""
    items = gl.allocate_shared_memory(gl.int32, [AHEAD, room_of(C)], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=HEARERS)
    fence_async_shared()
    thread_barrier()
    return items, told, heard


@gluon.jit
def take(row_tiles, count):
    """The next item. Every program takes until none of `count` is left, so as many are taken behind the first ones as
    there are items: whoever is last leaves none taken, for the next layer.
    """
    taken = gl.atomic_add(row_tiles, 1, sem="relaxed")
    if taken == count - 1:
        gl.store(row_tiles, 0)
    return gl.num_programs(0) + taken


@gluon.jit
def looked_up(item, row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, BLOCK_M: gl.constexpr):
    """The item of a number.

    As many heads side by side as have room for their keys in L2; then all row tiles of the next ones. There is none
    when all row tiles of all heads are taken.
    """
    request, head, row, skipped, begin = item * 0, item * 0, item * 0, item * 0, item * 0
    rows, prefix_len = item * 0, item * 0
    if item < tiles * num_kv_heads:
        before = item // (tiles * together) * together
        width = gl.minimum(together, num_kv_heads - before)
        rest = item - before * tiles
        entry = row_tiles + HEADER + rest // width * 2
        request, packed, head = gl.load(entry), gl.load(entry + 1) * BLOCK_M, before + rest % width
        row = packed // group
        skipped = packed - row * group
        begin = gl.load(q_indptr + request)
        rows = gl.load(q_indptr + request + 1) - begin
        prefix_len = gl.load(prefix_lens + request)
    return Item(
        request=request, head=head, row=row, skipped=skipped, begin=begin, rows=rows, prefix_len=prefix_len
    )  # fmt: skip


@gluon.jit
def tiles_of(row, skipped, prefix_len, rows, group, inverse, window_left, C: gl.constexpr):
    """First tile of keys that a row tile sees, and the one past the last."""
    first = row * 0
    if C.WINDOW:
        first = gl.maximum(prefix_len + row - window_left, 0) // C.BLOCK_N
    last, _ = apart(skipped + C.BLOCK_M - 1, group, inverse)
    highest = gl.minimum(row + last, rows - 1)
    return first, (prefix_len + highest + C.BLOCK_N) // C.BLOCK_N


@gluon.jit
def seen_by(item, group, inverse, window_left, C: gl.constexpr):
    """`tiles_of` an item."""
    return tiles_of(item.row, item.skipped, item.prefix_len, item.rows, group, inverse, window_left, C)


@gluon.jit
def whole_of(item, group, inverse, window_left, C: gl.constexpr):
    """The span of an item that is all that it sees."""
    first, stop = seen_by(item, group, inverse, window_left, C)
    return Span(first=first, stop=stop, where=first * 0)


@gluon.jit
def walk(
    place, row_tiles, tiles, high, prefix_lens, q_indptr, num_kv_heads, group, inverse, window_left, C: gl.constexpr
):  # fmt: skip
    """The next item of a program's piece, its span there, and the place behind it.

    Args:
        place: number of the row tile in line; its first tile of keys that is the piece's, -1 for the first that it
            sees; what is left of the piece; whether another row tile came before.
    """
    entry, tile, left, half = place
    number, head = gl.program_id(0) // num_kv_heads, gl.program_id(0) % num_kv_heads
    request, packed, row, skipped, begin = entry * 0, entry * 0, entry * 0, entry * 0, entry * 0
    rows, prefix_len, stop, where = entry * 0, entry * 0, entry * 0, entry * 0
    # As `kernels.split.in_line` has it.
    requests = gl.maximum(tiles // high, 1)
    while (left > 0) & (rows == 0):
        at = row_tiles + HEADER + (entry % requests * high + entry // requests) * 2
        request, packed = gl.load(at), gl.load(at + 1) * C.BLOCK_M
        row = packed // group
        skipped = packed - row * group
        begin = gl.load(q_indptr + request)
        rows = gl.load(q_indptr + request + 1) - begin
        prefix_len = gl.load(prefix_lens + request)
        first, end = tiles_of(row, skipped, prefix_len, rows, group, inverse, window_left, C)
        tile = gl.where(tile < 0, first, tile)
        stop = gl.minimum(tile + left, end)
        where = gl.where((tile == first) & (stop == end), 0, number * 2 + half + 1)
        # A piece may begin in the surplus of a row tile that others have done.
        rows = gl.where(tile < end, rows, 0)
        left -= end + C.ITEM_COST - tile
        entry += 1
        half = half * 0 + 1
        tile = gl.where(rows > 0, tile, -1)
    tile = gl.maximum(tile, 0)
    item = Item(
        request=request, head=head, row=row, skipped=skipped, begin=begin, rows=rows, prefix_len=prefix_len
    )  # fmt: skip
    return item, Span(first=tile, stop=stop, where=where), (entry, tile * 0 - 1, left, half)


@gluon.jit
def first_item(work, row_tiles, pieces, num_kv_heads, C: gl.constexpr):
    """Where a program begins: the number of the item that it has without taking one; its place on its piece, as `walk`
    takes it; and `high` of the line where row tiles are cut, else 0.
    """
    number, by_line = gl.program_id(0), num_kv_heads * 0
    place = (by_line, by_line, by_line, by_line)
    if C.CUT:
        by_line = gl.load(row_tiles + 3)
        which = number // num_kv_heads
        piece = work + gl.minimum(which, pieces - 1) * 4
        left = gl.where(which < pieces, gl.load(piece + 2), 0)
        place = (gl.load(piece), gl.load(piece + 1), left, by_line * 0)
    return number, place, by_line


@gluon.jit
def tell_item(number, place, by_line, batch, agenda, at, turn, C: gl.constexpr):
    """Look up an item of the agenda, or walk to the next one of a program's piece, and tell the other roles of it.

    Args:
        number: of the item that was taken.
        batch: what both take of it.
    """
    row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, inverse, window_left = batch
    if C.CUT:
        if by_line > 0:
            item, span, place = walk(
                place, row_tiles, tiles, by_line, prefix_lens, q_indptr, num_kv_heads, group, inverse, window_left, C
            )  # fmt: skip
        else:
            item = looked_up(number, row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, C.BLOCK_M)
            span = whole_of(item, group, inverse, window_left, C)
    else:
        item = looked_up(number, row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, C.BLOCK_M)
        span = ()
    at, turn = tell_next(item, span, agenda, at, turn, C)
    return item, span, place, at, turn


@gluon.jit
def tell_next(item, span, agenda, at, phase, C: gl.constexpr):
    """Write down an item, and its span where row tiles may be cut, for the other roles."""
    items, told, heard = agenda
    ROOM: gl.constexpr = room_of(C)
    all_of_it: gl.constexpr = gl.BlockedLayout([ROOM], [32], [gl.num_warps()], [0])
    which = gl.arange(0, ROOM, all_of_it)
    record = gl.full([ROOM], 0, gl.int32, all_of_it)
    words = item + span
    for i in gl.static_range(words_of(C)):
        record = gl.where(which == i, words[i], record)
    mbarrier.wait(heard.index(at), phase ^ 1)
    items.index(at).store(record)
    mbarrier.arrive(told.index(at), count=1)
    return next_slot(at, phase, AHEAD)


@gluon.jit
def word(record, i: gl.constexpr):
    """Word i of a record, which threads hold together."""
    which = gl.arange(0, record.shape[0], record.type.layout)
    return gl.sum(gl.where(which == i, record, 0), 0)


@gluon.jit
def hear_next(agenda, at, phase, C: gl.constexpr):
    """Read the next item that `tell_next` wrote, and its span, nothing where row tiles are not cut."""
    items, told, heard = agenda
    ROOM: gl.constexpr = room_of(C)
    all_of_it: gl.constexpr = gl.BlockedLayout([ROOM], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(at), phase)
    record = items.index(at).load(all_of_it)
    item = Item(
        request=word(record, 0), head=word(record, 1), row=word(record, 2), skipped=word(record, 3),
        begin=word(record, 4), rows=word(record, 5), prefix_len=word(record, 6),
    )  # fmt: skip
    span = Span(first=word(record, 7), stop=word(record, 8), where=word(record, 9)) if C.CUT else ()
    # An arrival waits for no load that is under way, but this branch does. Nothing here is negative.
    if gl.sum(record, 0) >= 0:
        mbarrier.arrive(heard.index(at), count=1)
    at, phase = next_slot(at, phase, AHEAD)
    return item, span, at, phase
