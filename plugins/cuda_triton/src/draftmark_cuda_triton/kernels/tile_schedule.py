"""write_metadata: the KV slot of every row, and the split-KV schedule or the row tiles. One launch.

Program i writes BLOCK_ROWS slots and BLOCK_SPLITS work records; each repeats the prefix sum over requests (R words
from L2), which costs less than a second launch. Worked size, 256 requests of 64 rows: 1 KiB of lengths read per
program, 128 KiB of slots and under 1 KiB of records written; a launch (about 3 µs) is the floor.
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
    """Records of pieces of a line of items.

    Args:
        split, start, split_length: of pieces, where in the line they begin, and how much of it they are.
        first, begin, length, exists, index: of items, their first tiles, and where in the line they begin, whether
            there are such, and their numbers.
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
    """Records of the items that pieces cut, behind those: number, first piece, number of pieces, and whether another
    item comes first in that piece; then of no item.
    """
    record = work + (num_splits + running_total(is_split.to(tl.int32)) - 1) * 4
    tl.store(record, index, mask=is_split)
    tl.store(record + 1, first_split, mask=is_split)
    tl.store(record + 2, num_parts, mask=is_split)
    tl.store(record + 3, is_second.to(tl.int32), mask=is_split)
    unused = (index >= total(is_split.to(tl.int32), 0)) & (index < num_splits - 1)
    tl.store(work + (num_splits + index) * 4 + 2, index * 0, mask=unused)


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
):
    """A batch whose requests all have q_len rows and tail_len tail slots; RAGGED: at most so many, as q_indptr says.

    Args:
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of position L + T - q + j; -1 of a row that belongs
            to no request. HAS_SLOTS: the engine's slots, as they are.
        work: int32 ``[2 · pieces, 4]``, out. A piece: request, first tile, length (0: idle), unused. A request is
            OVERHEAD_TILES longer than its tiles; a piece may begin in that surplus. Behind the pieces, the requests
            that they cut: request, first piece, number of pieces (0: no request), whether another comes first in that
            piece.
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
        # 64-bit: page · P passes 2**31 in a large pool (vllm#47671).
        tl.store(slot_mapping + row, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=live)

    if pid * BLOCK_SPLITS < num_splits:
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
"""Words of `row_tiles` before the first row tile: `common.SCHEDULE_HEADER_ROWS` rows of two."""


@inline
def locate_row_tile(entry, tiles_of_request, exists, index):
    """Request and index of row tiles by their number, of requests that have so many each; a request's last one comes
    first. Behind the last row tile the request is the one behind the last, and the index means nothing.
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
    """When row tiles are taken that are taken whole: the longest first, so that no long one is begun last.

    Those of one request stay together, for they read the same keys, and the longest request comes first; or all are
    in one order. Of equal ones a lower request's come first.

    Args:
        request, m, exists_here: of row tiles, their request, their index, and whether they are any. index, keys,
            prefixes,
            tiles_of_request: of requests, their number, their keys in all and before their rows, their row tiles.
            together: whether L2 has room for the keys of all requests.
    """
    before = (index[None, :] < request[:, None]).to(tl.int32)
    prefix_len = tl.load(prefix_lens + request, mask=exists_here, other=0)
    if fits_l2:
        # Keys times the group, of which there are few where it is asked.
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
    """Into how many pieces a line of row tiles is cut.

    Pieces of requests of one height are as many for each row tile of a request (`split_kv.split_order`).

    Args:
        line: length of all row tiles of a KV head. tiles, tiles_per_request: row tiles, and those of a request, 1 where
            they differ.
    """
    splits_made = tl.minimum(tl.maximum(line // MIN_SPLIT_TILES, tiles), num_splits)
    level = splits_made // tiles_per_request * tiles_per_request
    return tl.maximum(tl.where(8 * level >= 7 * splits_made, level, splits_made), 1)


@inline
def splitting_pays(line, longest, tiles, num_ctas, num_kv_heads, SPLIT_COST: tl.constexpr):
    """Whether row tiles that are cut take less time than those that are taken whole, one by one
    (`split_kv.splitting_pays` says the same). Of more row tiles than programs the host has said so. NOTES.md has the
    measurements.

    Args:
        line, longest: length of all row tiles of a KV head, and of the longest. num_ctas: that the device holds at a
            time. SPLIT_COST: `split_kv.split_costs`.
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
    """A ragged causal batch (EXTEND): request r brings q_indptr[r+1] - q_indptr[r] rows.

    Args:
        slot_mapping: int64 ``[num_rows]``, out.
        row_tiles: int32 ``[2 + num_tiles, 2]``, out: how many row tiles of how many heads were taken, 0 now, and how
            many row tiles there are; how many KV heads are worked on side by side, and 0 where row tiles are whole, or
            `tiles_per_request` of the line that they are cut from (`split_kv.split_order`); then request and index of a
            row tile, request -1 where there is none. Where they are whole, the longest come first
            (`longest_first_order`); where they may be SPLIT_KV, a request's last one does.
        work: int32 ``[2 · pieces, 4]``, out, if row tiles may be SPLIT_KV: of those in line, as
            `write_metadata_decode_verify` has it of requests; all idle where they are taken whole. A piece is no
            shorter than MIN_SPLIT_TILES, unless as many row tiles are.
        l2_keys: keys of one KV head that L2 has room for, so that programs find there what others have read.
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
