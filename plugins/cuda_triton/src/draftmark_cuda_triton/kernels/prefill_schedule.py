"""Kernel of write_metadata for prefill: KV slots, row tiles and their split schedule, in one launch.

For the kernels in this folder the grid is the schedule: program i processes split or row tile i. Prefill on Hopper has
a scheduler inside the kernel, `kernels_sm90.tile_scheduler`, which takes row tiles dynamically. Programs read requests
as in `tile_schedule`.
"""

import triton
import triton.language as tl

from .inline import bound, inline
from .reduce import largest, running_total, total
from .split_kv import row_tile_kv_range, split_order
from .tile_schedule import clear_combine_records, passed_items, request_of_row, write_combine_records, write_splits

HEADER_WORDS = tl.constexpr(4)
"""Words of `row_tiles` before the first row tile: `common.SCHEDULE_HEADER_ROWS` rows of two words."""


@inline
def rows_and_row_tiles(q_indptr, request, exists, group, block_m):
    """Return the rows of each request and its row tiles; 0 where `exists` is False."""
    rows = tl.load(q_indptr + request + 1, mask=exists, other=0) - tl.load(q_indptr + request, mask=exists, other=0)
    return rows, (rows * group + block_m - 1) // block_m


@inline
def locate_row_tile(entry, q_indptr, num_reqs, group, block_m, BLOCK_R: tl.constexpr):
    """Return request and index of the row tile at each position `entry`; the last row tile of a request comes first.

    Past the last row tile this returns request = num_requests; the index is then undefined.
    """
    request = entry * 0
    before = entry * 0
    offset = num_reqs * 0
    for first in range(0, bound(num_reqs), BLOCK_R):
        one = first + tl.arange(0, BLOCK_R)
        _, tiles = rows_and_row_tiles(q_indptr, one, one < num_reqs, group, block_m)
        passed, passed_tiles = passed_items(entry, offset + running_total(tiles), tiles, one < num_reqs)
        request += passed
        before += passed_tiles
        offset += total(tiles, 0)
    _, tiles_here = rows_and_row_tiles(q_indptr, request, request < num_reqs, group, block_m)
    return request, before + tiles_here - 1 - entry


@inline
def batch_totals(prefix_lens, q_indptr, num_reqs, group, block_m, BLOCK_R: tl.constexpr):
    """Return the row tiles of a batch, the most of one request, the keys of a batch, and the most of one request."""
    tiles_of_all = num_reqs * 0
    most_tiles = num_reqs * 0
    keys_of_all = num_reqs * 0
    most_keys = num_reqs * 0
    for first in range(0, bound(num_reqs), BLOCK_R):
        one = first + tl.arange(0, BLOCK_R)
        rows, tiles = rows_and_row_tiles(q_indptr, one, one < num_reqs, group, block_m)
        keys = tl.where(tiles > 0, tl.load(prefix_lens + one, mask=one < num_reqs, other=0) + rows, 0)
        tiles_of_all += total(tiles, 0)
        most_tiles = tl.maximum(most_tiles, largest(tiles, 0))
        keys_of_all += total(keys, 0)
        most_keys = tl.maximum(most_keys, largest(keys, 0))
    return tiles_of_all, most_tiles, keys_of_all, most_keys


@inline
def longest_first_order(
    request, m, exists_here, prefix_lens, q_indptr, num_reqs, fits_l2, group, block_m, BLOCK_R: tl.constexpr
):
    """Return the position of each row tile in the schedule: the longest row tiles start first.

    If the keys of all requests fit in L2, all row tiles are sorted together. Otherwise the row tiles of a request stay
    together, because they read the same keys, and the longest request comes first. Ties are sorted by request index.

    Args:
        request, m, exists_here: request of each row tile, its index within the request, and True for real tiles.
        fits_l2: True if L2 has room for the keys of all requests.
    """
    prefix_len = tl.load(prefix_lens + request, mask=exists_here, other=0)
    rows, tiles_here = rows_and_row_tiles(q_indptr, request, exists_here, group, block_m)
    order = request * 0
    for first in range(0, bound(num_reqs), BLOCK_R):
        one = first + tl.arange(0, BLOCK_R)
        other_rows, other_tiles = rows_and_row_tiles(q_indptr, one, one < num_reqs, group, block_m)
        other_prefix = tl.load(prefix_lens + one, mask=one < num_reqs, other=0)
        before = (one[None, :] < request[:, None]).to(tl.int32)
        if fits_l2:
            # The unit is keys times group. The product fits int32, because all keys fit in L2.
            seen = (prefix_len[:, None] - other_prefix[None, :]) * group + (m[:, None] + 1) * block_m
            tiles_ahead = tl.minimum(tl.maximum((seen - before) // block_m, 0), other_tiles[None, :])
            order += total(other_tiles[None, :] - tiles_ahead, 1)
        else:
            is_longer = (other_prefix + other_rows)[None, :] + before > (prefix_len + rows)[:, None]
            order += total(tl.where(is_longer, other_tiles[None, :], 0), 1)
    if not fits_l2:
        order += tiles_here - 1 - m
    return order


@inline
def choose_num_splits(line, tiles, tiles_per_request, num_splits, MIN_SPLIT_TILES: tl.constexpr):
    """Return the number of splits for a sequence of row tiles.

    If all requests have the same number of row tiles, the result is a multiple of that number, unless that loses more
    than an eighth of the splits (`split_kv.split_order`).

    Args:
        line: length of all row tiles of a KV head, in key tiles.
        tiles: number of row tiles.
        tiles_per_request: row tiles of each request; 1 if requests differ.
    """
    splits_made = tl.minimum(tl.maximum(line // MIN_SPLIT_TILES, tiles), num_splits)
    level = splits_made // tiles_per_request * tiles_per_request
    return tl.maximum(tl.where(8 * level >= 7 * splits_made, level, splits_made), 1)


@inline
def splitting_pays(line, longest, tiles, num_ctas, num_kv_heads, SPLIT_COST: tl.constexpr):
    """Return True if splitting the row tiles is estimated to be faster than whole row tiles.

    With at most one row tile a CTA, this applies the rule of `split_kv.ExtendTiles.splitting_pays` to the true lengths.
    With more row tiles the host has decided already, so the result is True.

    Args:
        line, longest: length of all row tiles of a KV head, and of the longest row tile, in key tiles.
        num_ctas: CTAs that the device runs at the same time.
        SPLIT_COST: cost of splitting, in key tiles (`heuristics.split_kv.split_costs`).
    """
    split_length = (line * num_kv_heads + num_ctas - 1) // num_ctas
    return (tiles * num_kv_heads > num_ctas) | (3 * split_length // 2 + SPLIT_COST < longest)


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_rows",
        "num_tiles",
        "group",
        "num_kv_heads",
        "l2_keys",
        "stride_table",
        "num_splits",
        "num_ctas",
        "window_left",
        "block_m",
        "block_n",
        "has_slots",
    ],
    do_not_specialize_on_alignment=[
        "prefix_lens",
        "q_indptr",
        "page_table",
        "engine_slots",
        "slot_mapping",
        "row_tiles",
        "work",
    ],
)
def write_metadata_prefill(
    prefix_lens,
    q_indptr,
    page_table,
    engine_slots,
    slot_mapping,
    row_tiles,
    work,
    num_reqs,
    num_rows,
    num_tiles,
    group,
    num_kv_heads,
    l2_keys,
    stride_table,
    num_splits,
    num_ctas,
    window_left,
    block_m,
    block_n,
    has_slots,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    SPLIT_COST: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Write slots, row tiles and splits of a ragged causal batch (EXTEND).

    Request r has q_indptr[r+1] - q_indptr[r] rows.

    Args:
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of each row's position. If `has_slots` is not 0 it is
            a copy of the engine's slots.
        row_tiles: int32 ``[2 + num_tiles, 2]``, out. Header words: [0] the counter of taken work tiles, set to 0; [1]
            the number of row tiles; [2] the number of KV heads processed at the same time; [3] tiles_per_request of the
            split sequence (`split_kv.split_order`), or 0 if row tiles are not split. The other rows hold request and
            index of each row tile; request -1 marks unused entries. With one split the longest row tile comes first
            (`longest_first_order`); otherwise the last row tile of each request does.
        work: int32 ``[2 · splits, 4]``, out, with several splits only: the records of `write_metadata_decode_verify`,
            for row tiles instead of requests; all idle if row tiles are not split. Splits have at least
            MIN_SPLIT_TILES key tiles on average.
        l2_keys: number of keys of one KV head that fit in L2. It limits the KV heads processed at the same time, so
            that a CTA finds keys in L2 that other CTAs have read.
        num_splits: 1 if row tiles are never split.
        block_m, block_n: packed rows of a row tile, keys of a key tile.
    """
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    live = entry < num_rows
    if has_slots != 0:
        tl.store(slot_mapping + entry, tl.load(engine_slots + entry, mask=live, other=-1), mask=live)
    else:
        owner = tl.minimum(request_of_row(entry, q_indptr, num_reqs, BLOCK_R), num_reqs - 1)
        position = tl.load(prefix_lens + owner, mask=live, other=0) + entry
        position -= tl.load(q_indptr + owner, mask=live, other=0)
        page = tl.load(page_table + owner.to(tl.int64) * stride_table + position // PAGE_SIZE, mask=live, other=0)
        tl.store(slot_mapping + entry, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=live)

    count, most_tiles, keys_of_all, most_keys = batch_totals(prefix_lens, q_indptr, num_reqs, group, block_m, BLOCK_R)
    request, m = locate_row_tile(entry, q_indptr, num_reqs, group, block_m, BLOCK_R)
    exists_here = request < num_reqs
    order = entry
    if (num_splits == 1) & (num_reqs > 1) & (pid * BLOCK < num_tiles):
        fits_l2 = keys_of_all <= l2_keys // num_kv_heads
        order = longest_first_order(
            request, m, exists_here, prefix_lens, q_indptr, num_reqs, fits_l2, group, block_m, BLOCK_R
        )
        order = tl.where(exists_here, order, entry)
    tile = row_tiles + HEADER_WORDS + order * 2
    tl.store(tile, tl.where(exists_here, request, -1), mask=entry < num_tiles)
    tl.store(tile + 1, tl.where(exists_here, m, 0), mask=entry < num_tiles)
    split_tiles_per_request = pid * 0
    if (num_splits > 1) & (pid * BLOCK_SPLITS < num_splits):
        item = tl.arange(0, BLOCK_TILES)
        tiles_per_request = tl.maximum(most_tiles, 1)
        tiles_per_request = tl.where(tiles_per_request * num_reqs == count, tiles_per_request, 1)
        of, which = locate_row_tile(
            split_order(item, count, tiles_per_request), q_indptr, num_reqs, group, block_m, BLOCK_R
        )
        is_tile = of < num_reqs
        rows, _ = rows_and_row_tiles(q_indptr, of, is_tile, group, block_m)
        prefix_len = tl.load(prefix_lens + of, mask=is_tile, other=0)
        first, stop = row_tile_kv_range(which, rows, prefix_len, group, window_left, block_m, block_n, WINDOW)
        length = tl.where(is_tile, stop - first + OVERHEAD_TILES, 0)
        line = tl.maximum(total(length, 0), 1)
        splits_made = choose_num_splits(line, count, tiles_per_request, num_splits, MIN_SPLIT_TILES)
        pays = splitting_pays(line, largest(length, 0), count, num_ctas, num_kv_heads, SPLIT_COST)
        use_splits = pays & (line // MIN_SPLIT_TILES > count)
        split = pid * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
        end_offset = running_total(length)
        start = tl.minimum(split, splits_made) * line // splits_made
        split_length = tl.where(use_splits, tl.minimum(split + 1, splits_made) * line // splits_made - start, 0)
        owner_tile, before = passed_items(start, end_offset, length, is_tile)
        owner_tile = tl.minimum(owner_tile, total(is_tile.to(tl.int32), 0) - 1)
        origin = total(tl.where(item[None, :] == owner_tile[:, None], first[None, :], 0), 1)
        write_splits(work, split, owner_tile, origin + start - before, split_length, num_splits)
        split_tiles_per_request = tl.where(use_splits, tiles_per_request, 0)
        if pid == 0:
            offset = end_offset - length
            first_split = ((offset + 1) * splits_made + line - 1) // line - 1
            num_parts = ((offset + stop - first) * splits_made + line - 1) // line - first_split
            is_split = is_tile & (num_parts > 1) & use_splits
            is_second = (first_split * line // splits_made < offset).to(tl.int32)
            place = which * 2 + is_second
            used = write_combine_records(work, num_splits, 0, is_split, of, first_split, num_parts, place)
            clear_combine_records(work, num_splits, used, item)
    if pid == 0:
        heads_in_l2 = tl.maximum(l2_keys // tl.maximum(most_keys, 1), 1)
        rounds = (num_kv_heads + heads_in_l2 - 1) // heads_in_l2
        tl.store(row_tiles, 0)
        tl.store(row_tiles + 1, count)
        tl.store(row_tiles + 2, (num_kv_heads + rounds - 1) // rounds)
        tl.store(row_tiles + 3, split_tiles_per_request)
