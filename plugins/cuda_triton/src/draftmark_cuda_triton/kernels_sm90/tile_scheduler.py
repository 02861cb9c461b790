"""Tile scheduler of prefill. A CTA gets work tiles dynamically, or walks over a precomputed split.

Dynamic (persistent CTAs, longest tiles first):

    row_tiles  │ tiles taken, tiles │ heads in L2, split │ tile 0 │ tile 1 │ …   written by `write_metadata_prefill`
    CTA        one partition takes a work tile and reads its record ──► publish ──► all other partitions receive it

Row tiles differ in cost: the last row tile of a prompt sees all its keys, the first one only a few. Estimated in key
tiles, a static round-robin order takes 3 % longer for 8 prompts of 4096 tokens, and 27 % longer for one prompt of 1024.
The scheduling partition runs up to SCHEDULER_STAGES work tiles ahead, so a record is ready when the other partitions
need it.

Split (SPLIT_KV, if `write_metadata_prefill` chose it):

    work       │ row tile, first key tile, key tiles │ …          one record for each split
    CTA        one partition walks over the split of one KV head ──► publish ──► all other partitions receive it

With few row tiles some CTAs would be idle while others attend to a long prefix. The key tiles of all row tiles then
form one sequence, which is divided into equal splits as `kernels.split_kv` divides requests. `kernels.combine` merges
the partial results.
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
"""Words of `row_tiles` before the first row tile: `common.SCHEDULE_HEADER_ROWS` rows of two words."""
SCHEDULER_STAGES = gl.constexpr(4)
"""Work tiles that the scheduling partition may be ahead: enough for a full pipeline of short requests."""


class WorkTile(NamedTuple):
    """Holds one row tile of one KV head, int32. A work tile with 0 rows means that no work is left.

    Attributes:
        request: index of the request in the batch.
        head: index of the KV head.
        row: query row of the request in which the row tile begins.
        head_offset: number of query heads of that row that belong to the previous row tile.
        q_begin: first row of the request in q.
        rows: rows of the request.
        prefix_len: tokens of the request before its rows.
    """

    request: gl.tensor
    head: gl.tensor
    row: gl.tensor
    head_offset: gl.tensor
    q_begin: gl.tensor
    rows: gl.tensor
    prefix_len: gl.tensor


class KvRange(NamedTuple):
    """Key tiles of a work tile that one CTA processes, int32; used with SPLIT_KV only.

    Attributes:
        first: first key tile.
        stop: end of the range, exclusive.
        partial: 0 if the range contains all keys that the row tile sees; otherwise 1 + the index of its partial result.
    """

    first: gl.tensor
    stop: gl.tensor
    partial: gl.tensor


@gluon.constexpr_function
def record_words(CFG):
    """Return the int32 words reserved for a work tile's record: a power of two."""
    return 16 if CFG.SPLIT_KV else 8


@gluon.jit
def make_tile_scheduler(NUM_RECEIVERS: gl.constexpr, CFG: gl.constexpr):
    """Allocate shared memory for work tile records, with a full and an empty barrier for each scheduler stage.

    NUM_RECEIVERS: number of partitions that read a record. Each arrives once at the empty barrier.
    """
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
    """Take the next work tile from the global counter and return its index; an index of `count` or more means none.

    CTA i starts with tile i and needs no counter for it. Each CTA continues until its index is `count` or more, so the
    counter is incremented exactly `count` times a launch. The last increment resets it to 0 for the next layer.
    """
    taken = gl.atomic_add(row_tiles, 1, sem="relaxed")
    if taken == count - 1:
        gl.store(row_tiles, 0)
    return gl.num_programs(0) + taken


@gluon.jit
def load_work_tile(
    tile_index, row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, BLOCK_M: gl.constexpr
):
    """Load the work tile with this index; past the last one, return a work tile with 0 rows.

    All row tiles of the first `heads_in_l2` KV heads come first, then those of the next `heads_in_l2` heads. The keys
    of this number of heads fit in L2 together.
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
    """Return the key tiles [first, stop) that a row tile sees."""
    first = row * 0
    if CFG.WINDOW:
        first = gl.maximum(prefix_len + row - window_left, 0) // CFG.BLOCK_N
    last, _ = split_packed_row(head_offset + CFG.BLOCK_M - 1, group, inv_group)
    max_position = gl.minimum(row + last, rows - 1)
    return first, (prefix_len + max_position + CFG.BLOCK_N) // CFG.BLOCK_N


@gluon.jit
def work_tile_kv_range(work_tile, group, inv_group, window_left, CFG: gl.constexpr):
    """Return `row_tile_kv_range` of a work tile."""
    return row_tile_kv_range(
        work_tile.row, work_tile.head_offset, work_tile.prefix_len, work_tile.rows, group, inv_group, window_left, CFG
    )


@gluon.jit
def unsplit_kv_range(work_tile, group, inv_group, window_left, CFG: gl.constexpr):
    """Return the `KvRange` that covers every key tile that a work tile sees."""
    first, stop = work_tile_kv_range(work_tile, group, inv_group, window_left, CFG)
    return KvRange(first=first, stop=stop, partial=first * 0)


@gluon.jit
def next_split_tile(
    cursor, row_tiles, tiles, tiles_per_request, prefix_lens, q_indptr, num_kv_heads, group, inv_group, window_left,
    CFG: gl.constexpr
):  # fmt: skip
    """Return the next work tile of this CTA's split, its `KvRange`, and the cursor after it.

    Args:
        cursor: four values: index of the row tile in the sequence; its first key tile in this split, or -1 to begin
            with the first key tile that the row tile sees; number of key tiles left in the split; 1 if this split has
            already processed another row tile, else 0.
    """
    entry, tile, tiles_left, partial_half = cursor
    split, head = gl.program_id(0) // num_kv_heads, gl.program_id(0) % num_kv_heads
    request, packed, row, head_offset, q_begin = entry * 0, entry * 0, entry * 0, entry * 0, entry * 0
    rows, prefix_len, stop, partial = entry * 0, entry * 0, entry * 0, entry * 0
    # Row tiles are in the order of `kernels.split_kv.split_order`: the last row tiles of all requests first.
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
        # The row tile gets 0 rows if only its OVERHEAD_TILES are left in the split; other splits process its key tiles.
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
    """Return the start of this CTA: its first tile index, its cursor for `next_split_tile`, and tiles_per_request.

    tiles_per_request is 0 if this batch is not split. The first tile index needs no `get_next_tile`.
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
    """Load the next work tile (from the counter, or from this CTA's split) and publish it to the other partitions.

    Args:
        tile_index: index from `get_next_tile`; unused if the batch is split.
        schedule: row_tiles, tiles, heads_in_l2, prefix_lens, q_indptr, num_kv_heads, group, inv_group, window_left.
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
    """Write a work tile, with SPLIT_KV its KvRange too, to shared memory, and signal the stage's full barrier."""
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
    """Return word i of a record that is distributed over the threads."""
    which = gl.arange(0, record.shape[0], record.type.layout)
    return gl.sum(gl.where(which == i, record, 0), 0)


@gluon.jit
def receive(scheduler, stage, phase, CFG: gl.constexpr):
    """Wait for the next published work tile and return it with its KvRange, or () without SPLIT_KV."""
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
    # The mbarrier arrival does not wait for outstanding loads of the record, but this branch on the loaded values does.
    # No word is negative, so the branch is always taken.
    if gl.sum(record, 0) >= 0:
        mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = advance(stage, phase, SCHEDULER_STAGES)
    return work_tile, kv_range, stage, phase
