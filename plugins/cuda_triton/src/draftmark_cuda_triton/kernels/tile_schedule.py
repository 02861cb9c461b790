"""Kernel of write_metadata for decode and verify: the KV slot of every row and the split-KV schedule, in one launch.

Program i writes BLOCK_ROWS slots and BLOCK_SPLITS work records. Each program repeats the prefix sum over the requests
(R words from L2), which costs less than a second launch. Example: 256 requests of 64 rows. Each program reads 1 KiB of
lengths; 128 KiB of slots and less than 1 KiB of records are written. The launch, about 3 µs, dominates.

Requests are read BLOCK_R at a time. So one compiled kernel serves every number of requests, rows and splits, uniform
and ragged batches, and every tile shape of a geometry.
"""

import triton
import triton.language as tl

from .inline import bound, inline
from .reduce import running_total, total
from .split_kv import (
    kv_tile_range,
    request_overhead,
    split_range,
    splits_started_before,
)


@inline
def passed_items(start, end_offset, length, exists):
    """Return the number of items that end at or before each split's start, and their total length.

    Args:
        start: start of each split in the sequence of items, in key tiles.
        end_offset, length, exists: end of each item in the sequence, its length, and True for real items.
    """
    passed = (end_offset[None, :] <= start[:, None]) & exists[None, :]
    return total(passed.to(tl.int32), 1), total(tl.where(passed, length[None, :], 0), 1)


@inline
def write_splits(work, split, owner, tile, split_length, num_splits):
    """Write the work record of each split: first item, that item's first key tile in the split, length in key tiles."""
    in_range = split < num_splits
    tl.store(work + split * 4, owner, mask=in_range)
    tl.store(work + split * 4 + 1, tile, mask=in_range)
    tl.store(work + split * 4 + 2, split_length, mask=in_range)


@inline
def write_combine_records(work, num_splits, used, is_split, request, first_split, num_parts, place):
    """Write one record for each item that lies in several splits; return the number of records so far.

    A record has four words: the item's request; its first split; its number of parts; twice the index of its row tile,
    plus 1 if another item comes first in that split. A request is one item with row tile 0.

    Args:
        used: records that are already written.
    """
    record = work + (num_splits + used + running_total(is_split.to(tl.int32)) - 1) * 4
    tl.store(record, request, mask=is_split)
    tl.store(record + 1, first_split, mask=is_split)
    tl.store(record + 2, num_parts, mask=is_split)
    tl.store(record + 3, place, mask=is_split)
    return used + total(is_split.to(tl.int32), 0)


@inline
def clear_combine_records(work, num_splits, used, index):
    """Write 0 parts to the records from `used` on, as far as `index` reaches: a combine program reads each of them."""
    tl.store(work + (num_splits + index) * 4 + 2, index * 0, mask=(index >= used) & (index < num_splits - 1))


@inline
def request_of_row(row, q_indptr, num_reqs, BLOCK_R: tl.constexpr):
    """Return the request of each row of a ragged batch; num_reqs for rows after the last request."""
    request = row * 0
    for first in range(0, bound(num_reqs), BLOCK_R):
        one = first + tl.arange(0, BLOCK_R)
        end = tl.load(q_indptr + one + 1, mask=one < num_reqs, other=0)
        request += total(((end[None, :] <= row[:, None]) & (one < num_reqs)[None, :]).to(tl.int32), 1)
    return request


@inline
def request_tiles(
    prefix_lens,
    q_indptr,
    request,
    exists,
    q_len,
    tail_len,
    window_left,
    block_n,
    WINDOW: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
):
    """Return the key tiles [first, end) of each request, and its length in key tiles with OVERHEAD_TILES."""
    is_ragged = q_len == 0
    begin = tl.load(q_indptr + request, mask=exists & is_ragged, other=0)
    tail_slots = tl.load(q_indptr + request + 1, mask=exists & is_ragged, other=0) - begin
    tail_slots = tl.where(is_ragged, tail_slots, tail_len)
    prefix_len = tl.load(prefix_lens + request, mask=exists, other=0)
    first, end = kv_tile_range(prefix_len, tail_slots, window_left, block_n, WINDOW)
    return first, end, tl.where(exists, end - first + request_overhead(tail_slots, OVERHEAD_TILES), 0)


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_rows",
        "q_len",
        "tail_len",
        "num_splits",
        "stride_table",
        "window_left",
        "block_n",
        "has_slots",
    ],
    do_not_specialize_on_alignment=["prefix_lens", "q_indptr", "page_table", "engine_slots", "slot_mapping", "work"],
)
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
    block_n,
    has_slots,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERHEAD_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    WHOLE_REQUESTS: tl.constexpr,
):
    """Write slots and splits of a decode or verify batch.

    Every request has q_len rows and tail_len tail tokens. In a ragged batch q_len is 0, and q_indptr holds the row
    ranges.

    Args:
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of position L + T - q + j; -1 for padding rows. If
            `has_slots` is not 0 it is a copy of the engine's slots.
        work: int32 ``[2 · splits, 4]``, out. First one record for each split: request, first key tile, length in key
            tiles (0: idle), unused. A request counts OVERHEAD_TILES more than its tiles. A split can begin within
            these, and then holds no key of that request. Then one record for each request in several splits: request,
            first split, number of parts (0: unused record), and 1 if another request comes first in that split.
            With WHOLE_REQUESTS it is ``[num_reqs, 4]`` and record r is all of request r.
        block_n: keys of a key tile.
    """
    pid = tl.program_id(0)
    row = pid * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    if has_slots != 0:
        tl.store(slot_mapping + row, tl.load(engine_slots + row, mask=live, other=-1), mask=live)
    else:
        request = row // tl.maximum(q_len, 1)
        offset = tail_len - q_len - request * q_len
        if q_len == 0:
            request = request_of_row(row, q_indptr, num_reqs, BLOCK_R)
            offset = 0 - tl.load(q_indptr + request, mask=live & (request < num_reqs), other=0)
        owned = live & (request < num_reqs)
        position = tl.load(prefix_lens + request, mask=owned, other=0) + row + offset
        page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE_SIZE, mask=owned, other=0)
        # 64-bit: page · P exceeds 2**31 in a large pool (vllm#47671).
        slot = tl.where(owned, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, -1)
        tl.store(slot_mapping + row, slot, mask=live)

    if WHOLE_REQUESTS:
        # Every record is a whole request, whatever the other requests are. A request without rows gets an idle record.
        one = pid * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
        first, _, length = request_tiles(
            prefix_lens,
            q_indptr,
            one,
            one < num_reqs,
            q_len,
            tail_len,
            window_left,
            block_n,
            WINDOW,
            OVERHEAD_TILES,
        )
        write_splits(work, one, one, first, length, num_reqs)
    elif pid * BLOCK_SPLITS < num_splits:
        index = tl.arange(0, BLOCK_R)
        line = pid * 0
        for base in range(0, bound(num_reqs), BLOCK_R):
            one = base + index
            _, _, length = request_tiles(
                prefix_lens,
                q_indptr,
                one,
                one < num_reqs,
                q_len,
                tail_len,
                window_left,
                block_n,
                WINDOW,
                OVERHEAD_TILES,
            )
            line += total(length, 0)
        split = pid * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
        start, split_length = split_range(line, split, num_splits)
        owner = split * 0
        before = split * 0
        offset_of_block = pid * 0
        used = pid * 0
        for base in range(0, bound(num_reqs), BLOCK_R):
            one = base + index
            exists = one < num_reqs
            first, end, length = request_tiles(
                prefix_lens,
                q_indptr,
                one,
                exists,
                q_len,
                tail_len,
                window_left,
                block_n,
                WINDOW,
                OVERHEAD_TILES,
            )
            end_offset = offset_of_block + running_total(length)
            passed, passed_length = passed_items(start, end_offset, length, exists)
            owner += passed
            before += passed_length
            offset_of_block += total(length, 0)
            if pid == 0:
                begin = end_offset - length
                first_split = splits_started_before(begin + 1, line, num_splits) - 1
                num_parts = splits_started_before(begin + end - first, line, num_splits) - first_split
                first_split_start, _ = split_range(line, first_split, num_splits)
                is_split = exists & (end > first) & (num_parts > 1)
                is_second = (first_split_start < begin).to(tl.int32)
                used = write_combine_records(work, num_splits, used, is_split, one, first_split, num_parts, is_second)
        owner = tl.minimum(owner, num_reqs - 1)
        first, _, _ = request_tiles(
            prefix_lens,
            q_indptr,
            owner,
            owner >= 0,
            q_len,
            tail_len,
            window_left,
            block_n,
            WINDOW,
            OVERHEAD_TILES,
        )
        write_splits(work, split, owner, first + start - before, split_length, num_splits)
        if pid == 0:
            for base in range(0, bound(num_reqs), BLOCK_R):
                clear_combine_records(work, num_splits, used, base + index)
