"""Who works on what in EXTEND: a program that is free takes the next row tile, whichever that is.

    row_tiles  │ taken, tiles │ heads side by side, 0 │ tile 0 │ tile 1 │ …      made by `kernels.schedule.write_ragged`
    program    one role takes an item (a row tile of a KV head), looks it up ──► told ──► the other roles hear it

Row tiles differ in cost: a prompt's last one sees all of its keys, the first one few. Dealt out by turns, the program
that gets the longer one of each turn ends 3 % late with 8 prompts of 4096 tokens, 27 % with one of 1024 (by count). The
role that takes is ahead by a ring of tiles, so what it looks up is there when the others ask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .names import thread_barrier
from .ring import next_slot

HEADER = gl.constexpr(4)
"""Words of `row_tiles` before the first row tile: `tiling.AGENDA_ROWS` rows of two."""
AHEAD = gl.constexpr(4)
"""Items that the role which takes them may be ahead of the others: a ring full of tiles of short requests."""


@gluon.jit
def make_agenda(HEARERS: gl.constexpr):
    """Room for items that were taken, and barriers that say that one is there, and that all HEARERS have it."""
    items = gl.allocate_shared_memory(gl.int32, [AHEAD, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    """An item's request and KV head; the request's row at which the row tile begins, and how many of that row's heads
    are the tile's before; the request's first row, its rows, and the tokens before them.

    As many heads side by side as have room for their keys in L2; then all row tiles of the next ones. Rows are 0 where
    there is no item: all row tiles of all heads are taken.
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
    return request, head, row, skipped, begin, rows, prefix_len


@gluon.jit
def tell_next(found, agenda, at, phase):
    """Write down an item, `looked_up`, for the other roles."""
    items, told, heard = agenda
    all_of_it: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    which = gl.arange(0, 8, all_of_it)
    record = gl.full([8], 0, gl.int32, all_of_it)
    for i in gl.static_range(7):
        record = gl.where(which == i, found[i], record)
    mbarrier.wait(heard.index(at), phase ^ 1)
    items.index(at).store(record)
    mbarrier.arrive(told.index(at), count=1)
    return next_slot(at, phase, AHEAD)


@gluon.jit
def hear_next(agenda, at, phase):
    """Read the next item that `tell_next` wrote."""
    items, told, heard = agenda
    all_of_it: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(at), phase)
    record, which = items.index(at).load(all_of_it), gl.arange(0, 8, all_of_it)
    found = ()
    for i in gl.static_range(7):
        found = found + (gl.sum(gl.where(which == i, record, 0), 0),)  # type: ignore[assignment]  # noqa: RUF005
    # An arrival waits for no load that is under way, but this branch does. Nothing here is negative.
    if gl.sum(record, 0) >= 0:
        mbarrier.arrive(heard.index(at), count=1)
    at, phase = next_slot(at, phase, AHEAD)
    return found, at, phase
