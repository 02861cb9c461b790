"""Kernels of write_metadata: the KV slot of every row, and the split-KV schedule or the row tiles, in one launch.

For most kernels the grid is the schedule: program i processes split or row tile i. Only prefill on Hopper has a
scheduler inside the kernel, `kernels_sm90.tile_scheduler`, which takes row tiles dynamically.

Program i writes BLOCK_ROWS slots and BLOCK_SPLITS work records. Each program repeats the prefix sum over the requests
(R words from L2), which costs less than a second launch. Example: 256 requests of 64 rows. Each program reads 1 KiB of
lengths; 128 KiB of slots and less than 1 KiB of records are written. The launch, about 3 µs, dominates.
"""

import triton
import triton.language as tl

from .inline import inline
from .reduce import largest, running_total, total
from .split_kv import (
    kv_tile_range,
    request_overhead,
    row_tile_kv_range,
    split_order,
    split_range,
    splits_started_before,
)


@inline
def write_splits(work, split, start, split_length, num_splits, first, begin, length, exists, index):
    """Write the work records of the splits that divide a sequence of items; an item is a request or a row tile.

    Args:
        split, start, split_length: index of each split, its start in the sequence and its length, in key tiles.
        first, begin, length: first key tile of each item, its start in the sequence and its length, in key tiles.
        exists, index: True for real items, and the index of each item.
    """
    end_offset = begin + length
    passed = (end_offset[None, :] <= start[:, None]) & exists[None, :]
    owner = tl.minimum(total(passed.to(tl.int32), 1), total(exists.to(tl.int32), 0) - 1)
    before = total(tl.where(passed, length[None, :], 0), 1)
    origin = total(tl.where(index[None, :] == owner[:, None], (first + index * 0)[None, :], 0), 1)
    in_range = split < num_splits
    tl.store(work + split * 4, owner, mask=in_range)
    tl.store(work + split * 4 + 1, origin + start - before, mask=in_range)
    tl.store(work + split * 4 + 2, split_length, mask=in_range)


@inline
def write_combine_records(work, num_splits, is_split, index, first_split, num_parts, is_second):
    """Write one record for each item that lies in several splits, after the work records; unused records hold 0 parts.

    A record has four words: index of the item; its first split; its number of parts; 1 if another item comes first in
    that split, else 0.
    """
    record = work + (num_splits + running_total(is_split.to(tl.int32)) - 1) * 4
    tl.store(record, index, mask=is_split)
    tl.store(record + 1, first_split, mask=is_split)
    tl.store(record + 2, num_parts, mask=is_split)
    tl.store(record + 3, is_second.to(tl.int32), mask=is_split)
    unused = (index >= total(is_split.to(tl.int32), 0)) & (index < num_splits - 1)
    tl.store(work + (num_splits + index) * 4 + 2, index * 0, mask=unused)


@inline
def write_whole_requests(
    work,
    prefix_lens,
    q_indptr,
    request,
    num_reqs,
    tail_len,
    window_left,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
):
    """Write one work record for each request: all of its key tiles, whatever the other requests are.

    A request without rows gets an idle record.
    """
    exists = request < num_reqs
    tail_slots = tail_len + request * 0
    if RAGGED:
        tail_slots = tl.load(q_indptr + request + 1, mask=exists, other=0)
        tail_slots -= tl.load(q_indptr + request, mask=exists, other=0)
    prefix_len = tl.load(prefix_lens + request, mask=exists, other=0)
    first, end = kv_tile_range(prefix_len, tail_slots, window_left, BLOCK_N, WINDOW, RAGGED)
    tl.store(work + request * 4, request, mask=exists)
    tl.store(work + request * 4 + 1, first, mask=exists)
    length = end - first + request_overhead(tail_slots, OVERHEAD_TILES, RAGGED)
    tl.store(work + request * 4 + 2, length, mask=exists)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "q_len", "tail_len", "num_splits", "stride_table"])
def write_metadata_decode_verify(
    prefix_lens,
    q_indptr,
    page_table,
    engine_slots,
    slot_mapping,
    work,
    num_reqs,
    num_rows,
    q_len,
    tail_len,
    num_splits,
    stride_table,
    window_left,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    WHOLE_REQUESTS: tl.constexpr,
):
    """Write slots and splits of a decode or verify batch.

    Every request has q_len rows and tail_len tail tokens. With RAGGED it has at most q_len rows; q_indptr holds the row
    ranges.

    Args:
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of position L + T - q + j; -1 for padding rows. With
            HAS_SLOTS it is a copy of the engine's slots.
        work: int32 ``[2 · splits, 4]``, out. First one record for each split: request, first key tile, length in key
            tiles (0: idle), unused. A request counts OVERHEAD_TILES more than its tiles. A split can begin within
            these, and then holds no key of that request. Then one record for each request in several splits: request,
            first split, number of parts (0: unused record), and 1 if another request comes first in that split.
            With WHOLE_REQUESTS it is ``[num_reqs, 4]`` and record r is all of request r.
    """
    pid = tl.program_id(0)
    row = pid * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    index = tl.arange(0, BLOCK_R)
    exists = index < num_reqs
    if HAS_SLOTS:
        tl.store(slot_mapping + row, tl.load(engine_slots + row, mask=live, other=-1), mask=live)
    elif RAGGED:
        ends = tl.load(q_indptr + index + 1, mask=exists, other=0)
        request = total(((ends[None, :] <= row[:, None]) & exists[None, :]).to(tl.int32), 1)
        owned = live & (request < num_reqs)
        position = tl.load(prefix_lens + request, mask=owned, other=0) + row
        position -= tl.load(q_indptr + request, mask=owned, other=0)
        page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE_SIZE, mask=owned, other=0)
        tl.store(
            slot_mapping + row, tl.where(owned, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, -1), mask=live
        )
    else:
        request = row // q_len
        position = tl.load(prefix_lens + request, mask=live, other=0) + tail_len - q_len + row % q_len
        page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE_SIZE, mask=live, other=0)
        # 64-bit: page · P exceeds 2**31 in a large pool (vllm#47671).
        tl.store(slot_mapping + row, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=live)

    if WHOLE_REQUESTS:
        write_whole_requests(
            work, prefix_lens, q_indptr, pid * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS), num_reqs, tail_len,
            window_left, BLOCK_N, WINDOW, RAGGED, OVERHEAD_TILES,
        )  # fmt: skip
    elif pid * BLOCK_SPLITS < num_splits:
        if RAGGED:
            tail_slots = tl.load(q_indptr + index + 1, mask=exists, other=0) - tl.load(
                q_indptr + index, mask=exists, other=0
            )
        else:
            tail_slots = tail_len + index * 0
        first, end = kv_tile_range(
            tl.load(prefix_lens + index, mask=exists, other=0), tail_slots, window_left, BLOCK_N, WINDOW, RAGGED
        )
        length = tl.where(exists, end - first + request_overhead(tail_slots, OVERHEAD_TILES, RAGGED), 0)
        end_offset = running_total(length)
        begin, line = end_offset - length, total(length, 0)
        split = pid * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
        start, split_length = split_range(line, split, num_splits)
        write_splits(work, split, start, split_length, num_splits, first, begin, length, exists, index)
        if pid == 0:
            first_split = splits_started_before(begin + 1, line, num_splits) - 1
            num_parts = splits_started_before(begin + end - first, line, num_splits) - first_split
            first_split_start, _ = split_range(line, first_split, num_splits)
            is_split = exists & (end > first) & (num_parts > 1)
            write_combine_records(work, num_splits, is_split, index, first_split, num_parts, first_split_start < begin)


HEADER_WORDS = tl.constexpr(4)
"""Words of `row_tiles` before the first row tile: `common.SCHEDULE_HEADER_ROWS` rows of two words."""


@inline
def locate_row_tile(entry, tiles_of_request, exists, index):
    """Return request and index of the row tile at each position `entry`; the last row tile of a request comes first.

    Past the last row tile this returns request = num_requests; the index is then undefined.
    """
    end_offset = running_total(tiles_of_request)
    passed = (end_offset[None, :] <= entry[:, None]) & exists[None, :]
    request = total(passed.to(tl.int32), 1)
    reached = index[None, :] <= request[:, None]
    last = total(tl.where(reached, tl.broadcast_to(tiles_of_request[None, :], passed.shape), 0), 1) - 1
    return request, last - entry


@inline
def longest_first_order(
    request,
    m,
    exists_here,
    index,
    keys,
    prefixes,
    tiles_of_request,
    prefix_lens,
    q_indptr,
    fits_l2,
    group,
    BLOCK_M: tl.constexpr,
):
    """Return the position of each row tile in the schedule: the longest row tiles start first.

    If the keys of all requests fit in L2, all row tiles are sorted together. Otherwise the row tiles of a request stay
    together, because they read the same keys, and the longest request comes first. Ties are sorted by request index.

    Args:
        request, m, exists_here: request of each row tile, its index within the request, and True for real tiles.
        index, keys, prefixes, tiles_of_request: index of each request, its keys, its keys before its rows, and its
            row tiles.
        fits_l2: True if L2 has room for the keys of all requests.
    """
    before = (index[None, :] < request[:, None]).to(tl.int32)
    prefix_len = tl.load(prefix_lens + request, mask=exists_here, other=0)
    if fits_l2:
        # The unit is keys times group. The product fits int32, because all keys fit in L2.
        seen = (prefix_len[:, None] - prefixes[None, :]) * group + (m[:, None] + 1) * BLOCK_M
        tiles_ahead = tl.minimum(tl.maximum((seen - before) // BLOCK_M, 0), tiles_of_request[None, :])
        order = total(tiles_of_request[None, :] - tiles_ahead, 1)
    else:
        rows = tl.load(q_indptr + request + 1, mask=exists_here, other=0) - tl.load(
            q_indptr + request, mask=exists_here, other=0
        )
        is_longer = keys[None, :] + before > (prefix_len + rows)[:, None]
        order = (
            total(tl.where(is_longer, tiles_of_request[None, :], 0), 1)
            + (rows * group + BLOCK_M - 1) // BLOCK_M
            - 1
            - m
        )
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

    With at most one row tile a CTA, this applies the rule of `heuristics.split_kv.splitting_pays` to the true lengths.
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
        "num_kv_heads",
        "l2_keys",
        "stride_table",
        "num_splits",
        "num_ctas",
    ]
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
    PAGE_SIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of each row's position. With HAS_SLOTS it is a copy
            of the engine's slots.
        row_tiles: int32 ``[2 + num_tiles, 2]``, out. Header words: [0] the counter of taken work tiles, set to 0; [1]
            the number of row tiles; [2] the number of KV heads processed at the same time; [3] tiles_per_request of the
            split sequence (`split_kv.split_order`), or 0 if row tiles are not split. The other rows hold request and
            index of each row tile; request -1 marks unused entries. Without SPLIT_KV the longest row tile comes first
            (`longest_first_order`); with SPLIT_KV the last row tile of each request does.
        work: int32 ``[2 · splits, 4]``, out, with SPLIT_KV only: the records of `write_metadata_decode_verify`, for row
            tiles instead of requests; all idle if row tiles are not split. Splits have at least MIN_SPLIT_TILES key
            tiles on average.
        l2_keys: number of keys of one KV head that fit in L2. It limits the KV heads processed at the same time, so
            that a CTA finds keys in L2 that other CTAs have read.
    """
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    index = tl.arange(0, BLOCK_R)
    exists = index < num_reqs
    begin = tl.load(q_indptr + index, mask=exists, other=0)
    end = tl.load(q_indptr + index + 1, mask=exists, other=0)

    live = entry < num_rows
    if HAS_SLOTS:
        tl.store(slot_mapping + entry, tl.load(engine_slots + entry, mask=live, other=-1), mask=live)
    else:
        owner = total(((end[None, :] <= entry[:, None]) & exists[None, :]).to(tl.int32), 1)
        owner = tl.minimum(owner, num_reqs - 1)
        position = tl.load(prefix_lens + owner, mask=live, other=0) + entry
        position -= tl.load(q_indptr + owner, mask=live, other=0)
        page = tl.load(page_table + owner.to(tl.int64) * stride_table + position // PAGE_SIZE, mask=live, other=0)
        tl.store(slot_mapping + entry, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=live)

    tiles_of_request = ((end - begin) * group + BLOCK_M - 1) // BLOCK_M
    request, m = locate_row_tile(entry, tiles_of_request, exists, index)
    exists_here = request < num_reqs
    prefixes = tl.load(prefix_lens + index, mask=exists, other=0)
    keys = tl.where(exists & (tiles_of_request > 0), prefixes + end - begin, 0)
    order = entry
    if not SPLIT_KV:  # noqa: SIM102
        if (num_reqs > 1) & (pid * BLOCK < num_tiles):
            fits_l2 = total(keys, 0) <= l2_keys // num_kv_heads
            order = longest_first_order(
                request,
                m,
                exists_here,
                index,
                keys,
                prefixes,
                tiles_of_request,
                prefix_lens,
                q_indptr,
                fits_l2,
                group,
                BLOCK_M,
            )
            order = tl.where(exists_here, order, entry)
    tile = row_tiles + HEADER_WORDS + order * 2
    tl.store(tile, tl.where(exists_here, request, -1), mask=entry < num_tiles)
    tl.store(tile + 1, tl.where(exists_here, m, 0), mask=entry < num_tiles)
    split_tiles_per_request = pid * 0
    if SPLIT_KV:  # noqa: SIM102
        if pid * BLOCK_SPLITS < num_splits:
            item = tl.arange(0, BLOCK_TILES)
            count, tiles_per_request = total(tiles_of_request, 0), tl.maximum(largest(tiles_of_request, 0), 1)
            tiles_per_request = tl.where(tiles_per_request * num_reqs == count, tiles_per_request, 1)
            of, which = locate_row_tile(split_order(item, count, tiles_per_request), tiles_of_request, exists, index)
            is_tile = of < num_reqs
            rows = tl.load(q_indptr + of + 1, mask=is_tile, other=0) - tl.load(q_indptr + of, mask=is_tile, other=0)
            prefix_len = tl.load(prefix_lens + of, mask=is_tile, other=0)
            first, stop = row_tile_kv_range(which, rows, prefix_len, group, window_left, BLOCK_M, BLOCK_N, WINDOW)
            length = tl.where(is_tile, stop - first + OVERHEAD_TILES, 0)
            line = tl.maximum(total(length, 0), 1)
            splits_made = choose_num_splits(line, count, tiles_per_request, num_splits, MIN_SPLIT_TILES)
            pays = splitting_pays(line, largest(length, 0), count, num_ctas, num_kv_heads, SPLIT_COST)
            use_splits = pays & (line // MIN_SPLIT_TILES > count)
            split = pid * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
            offset = running_total(length) - length
            start = tl.minimum(split, splits_made) * line // splits_made
            split_length = tl.where(use_splits, tl.minimum(split + 1, splits_made) * line // splits_made - start, 0)
            write_splits(work, split, start, split_length, num_splits, first, offset, length, is_tile, item)
            split_tiles_per_request = tl.where(use_splits, tiles_per_request, 0)
            if pid == 0:
                first_split = ((offset + 1) * splits_made + line - 1) // line - 1
                num_parts = ((offset + stop - first) * splits_made + line - 1) // line - first_split
                is_split = is_tile & (num_parts > 1) & use_splits
                write_combine_records(
                    work, num_splits, is_split, item, first_split, num_parts, first_split * line // splits_made < offset
                )
    if pid == 0:
        heads_in_l2 = tl.maximum(l2_keys // tl.maximum(largest(keys, 0), 1), 1)
        rounds = (num_kv_heads + heads_in_l2 - 1) // heads_in_l2
        tl.store(row_tiles, 0)
        tl.store(row_tiles + 1, total(tiles_of_request, 0))
        tl.store(row_tiles + 2, (num_kv_heads + rounds - 1) // rounds)
        tl.store(row_tiles + 3, split_tiles_per_request)
