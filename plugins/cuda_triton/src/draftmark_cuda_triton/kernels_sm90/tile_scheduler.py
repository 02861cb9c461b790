"""Dynamic persistent tile scheduler of prefill: a CTA that is free takes the next row tile.

    row_tiles  │ taken, tiles │ heads side by side, cut │ tile 0 │ tile 1 │ …   made by `write_metadata_prefill`
    program    one role takes an item (a row tile of a KV head), looks it up ──► told ──► the other roles hear it

Row tiles differ in cost: a prompt's last one sees all of its keys, the first one few. Dealt out by turns, the program
that gets the longer one of each turn ends 3 % late with 8 prompts of 4096 tokens, 27 % with one of 1024 (by count). The
role that takes is ahead by a ring of tiles, so what it looks up is there when the others ask.

    work       │ row tile, first tile of keys, length │ …         made there too, where row tiles may be SPLIT_KV
    program    one role walks along the piece of one KV head ──► told ──► the other roles hear it

Of few row tiles some programs would be idle while others walk over a long prefix. Those are in one line, cut into a
piece for each program as `kernels.split_kv` cuts requests, and merged as there, if the schedule says so.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .config import work_tile_words
from .gluon_compat import thread_barrier
from .pack_gqa import split_packed_row
from .pipeline import advance

HEADER_WORDS = gl.constexpr(4)
"""Words of `row_tiles` before the first row tile: `common.SCHEDULE_HEADER_ROWS` rows of two."""
SCHEDULER_STAGES = gl.constexpr(4)
"""Items that the role which takes them may be ahead of the others: a ring full of tiles of short requests."""


class WorkTile(NamedTuple):
    """A row tile of a KV head, int32; there is none where it has no rows.

    Attributes:
        request, head: which.
        row, head_offset: the request's row at which it begins, and how many of that row's heads are the tile's before.
        q_begin, rows: the request's first row, and its rows.
        prefix_len: tokens before them.
    """

    request: gl.tensor
    head: gl.tensor
    row: gl.tensor
    head_offset: gl.tensor
    q_begin: gl.tensor
    rows: gl.tensor
    prefix_len: gl.tensor


class KvRange(NamedTuple):
    """What of an item's keys a program has, where row tiles may be cut, int32.

    Attributes:
        first, stop: its first tile of them, and the one past the last.
        partial: 0 where those are all that it sees; else one more than the number of its place among partials.
    """

    first: gl.tensor
    stop: gl.tensor
    partial: gl.tensor


@gluon.constexpr_function
def record_words(CFG):
    """Words that an item has room for: a power of two."""
    return 16 if CFG.SPLIT_KV else 8


@gluon.jit
def make_tile_scheduler(NUM_RECEIVERS: gl.constexpr, CFG: gl.constexpr):
    """Room for items that were taken, and barriers that say that one is there, and that all NUM_RECEIVERS have it."""
    records = gl.allocate_shared_memory(
        gl.int32, [SCHEDULER_STAGES, record_words(CFG)], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full = gl.allocate_shared_memory(gl.int64, [SCHEDULER_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SCHEDULER_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SCHEDULER_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NUM_RECEIVERS)
    fence_async_shared()
    thread_barrier()
    return records, full, empty


@gluon.jit
def get_next_tile(row_tiles, count):
    """The next item. Every program takes until none of `count` is left, so as many are taken behind the first ones as
    there are items: whoever is last leaves none taken, for the next layer.
    """
    taken = gl.atomic_add(row_tiles, 1, sem="relaxed")
    if taken == count - 1:
        gl.store(row_tiles, 0)
    return gl.num_programs(0) + taken


@gluon.jit
def load_work_tile(
    tile_index, row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, BLOCK_M: gl.constexpr
):
    """The item of a number.

    As many heads side by side as have room for their keys in L2; then all row tiles of the next ones. There is none
    when all row tiles of all heads are taken.
    """
    request, head, row, head_offset, q_begin = (
        tile_index * 0,
        tile_index * 0,
        tile_index * 0,
        tile_index * 0,
        tile_index * 0,
    )
    rows, prefix_len = tile_index * 0, tile_index * 0
    if tile_index < tiles * num_kv_heads:
        before = tile_index // (tiles * heads_in_l2) * heads_in_l2
        width = gl.minimum(heads_in_l2, num_kv_heads - before)
        rest = tile_index - before * tiles
        entry = row_tiles + HEADER_WORDS + rest // width * 2
        request, packed, head = gl.load(entry), gl.load(entry + 1) * BLOCK_M, before + rest % width
        row = packed // group
        head_offset = packed - row * group
        q_begin = gl.load(q_indptr + request)
        rows = gl.load(q_indptr + request + 1) - q_begin
        prefix_len = gl.load(prefix_lens + request)
    return WorkTile(
        request=request, head=head, row=row, head_offset=head_offset, q_begin=q_begin, rows=rows, prefix_len=prefix_len
    )  # fmt: skip


@gluon.jit
def row_tile_kv_range(row, head_offset, prefix_len, rows, group, inv_group, window_left, CFG: gl.constexpr):
    """First tile of keys that a row tile sees, and the one past the last."""
    first = row * 0
    if CFG.WINDOW:
        first = gl.maximum(prefix_len + row - window_left, 0) // CFG.BLOCK_N
    last, _ = split_packed_row(head_offset + CFG.BLOCK_M - 1, group, inv_group)
    max_position = gl.minimum(row + last, rows - 1)
    return first, (prefix_len + max_position + CFG.BLOCK_N) // CFG.BLOCK_N


@gluon.jit
def work_tile_kv_range(work_tile, group, inv_group, window_left, CFG: gl.constexpr):
    """`row_tile_kv_range` an item."""
    return row_tile_kv_range(
        work_tile.row, work_tile.head_offset, work_tile.prefix_len, work_tile.rows, group, inv_group, window_left, CFG
    )


@gluon.jit
def unsplit_kv_range(work_tile, group, inv_group, window_left, CFG: gl.constexpr):
    """The span of an item that is all that it sees."""
    first, stop = work_tile_kv_range(work_tile, group, inv_group, window_left, CFG)
    return KvRange(first=first, stop=stop, partial=first * 0)


@gluon.jit
def next_split_tile(
    cursor, row_tiles, tiles, tiles_per_request, prefix_lens, q_indptr, num_kv_heads, group, inv_group, window_left,
    CFG: gl.constexpr
):  # fmt: skip
    """The next item of a program's piece, its span there, and the place behind it.

    Args:
        cursor: number of the row tile in line; its first tile of keys that is the piece's, -1 for the first that it
            sees; what is left of the piece; whether another row tile came before.
    """
    entry, tile, tiles_left, partial_half = cursor
    split, head = gl.program_id(0) // num_kv_heads, gl.program_id(0) % num_kv_heads
    request, packed, row, head_offset, q_begin = entry * 0, entry * 0, entry * 0, entry * 0, entry * 0
    rows, prefix_len, stop, partial = entry * 0, entry * 0, entry * 0, entry * 0
    # As `kernels.split_kv.split_order` has it.
    requests = gl.maximum(tiles // tiles_per_request, 1)
    while (tiles_left > 0) & (rows == 0):
        entry_address = row_tiles + HEADER_WORDS + (entry % requests * tiles_per_request + entry // requests) * 2
        request, packed = gl.load(entry_address), gl.load(entry_address + 1) * CFG.BLOCK_M
        row = packed // group
        head_offset = packed - row * group
        q_begin = gl.load(q_indptr + request)
        rows = gl.load(q_indptr + request + 1) - q_begin
        prefix_len = gl.load(prefix_lens + request)
        first, end = row_tile_kv_range(row, head_offset, prefix_len, rows, group, inv_group, window_left, CFG)
        tile = gl.where(tile < 0, first, tile)
        stop = gl.minimum(tile + tiles_left, end)
        partial = gl.where((tile == first) & (stop == end), 0, split * 2 + partial_half + 1)
        # A piece may begin in the surplus of a row tile that others have done.
        rows = gl.where(tile < end, rows, 0)
        tiles_left -= end + CFG.OVERHEAD_TILES - tile
        entry += 1
        partial_half = partial_half * 0 + 1
        tile = gl.where(rows > 0, tile, -1)
    tile = gl.maximum(tile, 0)
    work_tile = WorkTile(
        request=request, head=head, row=row, head_offset=head_offset, q_begin=q_begin, rows=rows, prefix_len=prefix_len
    )  # fmt: skip
    return work_tile, KvRange(first=tile, stop=stop, partial=partial), (entry, tile * 0 - 1, tiles_left, partial_half)


@gluon.jit
def first_work_tile(work, row_tiles, num_splits, num_kv_heads, CFG: gl.constexpr):
    """Where a program begins: the number of the item that it has without taking one; its place on its piece, as
    `next_split_tile` takes it; and `tiles_per_request` of the line where row tiles are cut, else 0.
    """
    tile_index, split_tiles_per_request = gl.program_id(0), num_kv_heads * 0
    cursor = (split_tiles_per_request, split_tiles_per_request, split_tiles_per_request, split_tiles_per_request)
    if CFG.SPLIT_KV:
        split_tiles_per_request = gl.load(row_tiles + 3)
        split = tile_index // num_kv_heads
        split_record = work + gl.minimum(split, num_splits - 1) * 4
        tiles_left = gl.where(split < num_splits, gl.load(split_record + 2), 0)
        cursor = (gl.load(split_record), gl.load(split_record + 1), tiles_left, split_tiles_per_request * 0)
    return tile_index, cursor, split_tiles_per_request


@gluon.jit
def schedule_next(tile_index, cursor, split_tiles_per_request, schedule, scheduler, stage, phase, CFG: gl.constexpr):
    """Look up an item of the agenda, or walk to the next one of a program's piece, and tell the other roles of it.

    Args:
        tile_index: of the item that was taken.
        schedule: what both take of it.
    """
    row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, inv_group, window_left = schedule
    if CFG.SPLIT_KV:
        if split_tiles_per_request > 0:
            work_tile, kv_range, cursor = next_split_tile(
                cursor, row_tiles, tiles, split_tiles_per_request, prefix_lens, q_indptr, num_kv_heads, group,
                inv_group, window_left, CFG
            )  # fmt: skip
        else:
            work_tile = load_work_tile(
                tile_index, row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, CFG.BLOCK_M
            )
            kv_range = unsplit_kv_range(work_tile, group, inv_group, window_left, CFG)
    else:
        work_tile = load_work_tile(
            tile_index, row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, CFG.BLOCK_M
        )
        kv_range = ()
    stage, phase = publish(work_tile, kv_range, scheduler, stage, phase, CFG)
    return work_tile, kv_range, cursor, stage, phase


@gluon.jit
def publish(work_tile, kv_range, scheduler, stage, phase, CFG: gl.constexpr):
    """Write down an item, and its span where row tiles may be cut, for the other roles."""
    records, full, empty = scheduler
    CAPACITY: gl.constexpr = record_words(CFG)
    layout: gl.constexpr = gl.BlockedLayout([CAPACITY], [32], [gl.num_warps()], [0])
    which = gl.arange(0, CAPACITY, layout)
    record = gl.full([CAPACITY], 0, gl.int32, layout)
    words = work_tile + kv_range
    for i in gl.static_range(work_tile_words(CFG)):
        record = gl.where(which == i, words[i], record)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    records.index(stage).store(record)
    mbarrier.arrive(full.index(stage), count=1)
    return advance(stage, phase, SCHEDULER_STAGES)


@gluon.jit
def get_word(record, i: gl.constexpr):
    """Word i of a record, which threads hold together."""
    which = gl.arange(0, record.shape[0], record.type.layout)
    return gl.sum(gl.where(which == i, record, 0), 0)


@gluon.jit
def receive(scheduler, stage, phase, CFG: gl.constexpr):
    """Read the next item that `publish` wrote, and its span, nothing where row tiles are not cut."""
    records, full, empty = scheduler
    CAPACITY: gl.constexpr = record_words(CFG)
    layout: gl.constexpr = gl.BlockedLayout([CAPACITY], [32], [gl.num_warps()], [0])
    mbarrier.wait(full.index(stage), phase)
    record = records.index(stage).load(layout)
    work_tile = WorkTile(
        request=get_word(record, 0), head=get_word(record, 1), row=get_word(record, 2), head_offset=get_word(record, 3),
        q_begin=get_word(record, 4), rows=get_word(record, 5), prefix_len=get_word(record, 6),
    )  # fmt: skip
    kv_range = (
        KvRange(first=get_word(record, 7), stop=get_word(record, 8), partial=get_word(record, 9))
        if CFG.SPLIT_KV
        else ()
    )
    # An arrival waits for no load that is under way, but this branch does. Nothing here is negative.
    if gl.sum(record, 0) >= 0:
        mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = advance(stage, phase, SCHEDULER_STAGES)
    return work_tile, kv_range, stage, phase
