"""write_metadata: the KV slot of every row, and who works on which tiles. One launch.

Program i writes BLOCK_ROWS slots and BLOCK_PIECES work records; each repeats the prefix sum over requests (R words
from L2), which costs less than a second launch. Worked size, 256 requests of 64 rows: 1 KiB of lengths read per
program, 128 KiB of slots and under 1 KiB of records written; a launch (about 3 µs) is the floor.
"""

import triton
import triton.language as tl

from .inline import inline
from .reduce import largest, running_total, total
from .split import begun_before, in_line, piece, surplus, tile_range, tiles_of


@inline
def write_pieces(work, number, start, share, pieces, first, begin, length, exists, index):
    """Records of pieces of a line of items.

    Args:
        number, start, share: of pieces, where in the line they begin, and how much of it they are.
        first, begin, length, exists, index: of items, their first tiles, and where in the line they begin, whether
            there are such, and their numbers.
    """
    upto = begin + length
    passed = (upto[None, :] <= start[:, None]) & exists[None, :]
    owner = tl.minimum(total(passed.to(tl.int32), 1), total(exists.to(tl.int32), 0) - 1)
    before = total(tl.where(passed, length[None, :], 0), 1)
    origin = total(tl.where(index[None, :] == owner[:, None], (first + index * 0)[None, :], 0), 1)
    written = number < pieces
    tl.store(work + number * 4, owner, mask=written)
    tl.store(work + number * 4 + 1, origin + start - before, mask=written)
    tl.store(work + number * 4 + 2, share, mask=written)


@inline
def write_cuts(work, pieces, is_cut, index, holder, parts, comes_later):
    """Records of the items that pieces cut, behind those: number, first piece, number of pieces, and whether another
    item comes first in that piece; then of no item.
    """
    cut = work + (pieces + running_total(is_cut.to(tl.int32)) - 1) * 4
    tl.store(cut, index, mask=is_cut)
    tl.store(cut + 1, holder, mask=is_cut)
    tl.store(cut + 2, parts, mask=is_cut)
    tl.store(cut + 3, comes_later.to(tl.int32), mask=is_cut)
    left_over = (index >= total(is_cut.to(tl.int32), 0)) & (index < pieces - 1)
    tl.store(work + (pieces + index) * 4 + 2, index * 0, mask=left_over)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "q_len", "tail_len", "pieces", "stride_table"])
def write_uniform(
    prefix_lens,
    q_indptr,
    page_table,
    given_slots,
    slot_mapping,
    work,
    num_reqs,
    num_rows,
    q_len,
    tail_len,
    pieces,
    stride_table,
    window_left,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    GIVEN: tl.constexpr,
    ITEM_COST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    """A batch whose requests all have q_len rows and tail_len tail slots; RAGGED: at most so many, as q_indptr says.

    Args:
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of position L + T - q + j; -1 of a row that belongs
            to no request. GIVEN: the engine's slots, as they are.
        work: int32 ``[2 · pieces, 4]``, out. A piece: request, first tile, length (0: idle), unused. A request is
            ITEM_COST longer than its tiles; a piece may begin in that surplus. Behind the pieces, the requests that
            they cut: request, first piece, number of pieces (0: no request), whether another comes first in that piece.
    """
    pid = tl.program_id(0)
    row = pid * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    index = tl.arange(0, BLOCK_R)
    exists = index < num_reqs
    if GIVEN:
        tl.store(slot_mapping + row, tl.load(given_slots + row, mask=live, other=-1), mask=live)
    elif RAGGED:
        ends = tl.load(q_indptr + index + 1, mask=exists, other=0)
        request = total(((ends[None, :] <= row[:, None]) & exists[None, :]).to(tl.int32), 1)
        owned = live & (request < num_reqs)
        position = tl.load(prefix_lens + request, mask=owned, other=0) + row
        position -= tl.load(q_indptr + request, mask=owned, other=0)
        page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE, mask=owned, other=0)
        tl.store(slot_mapping + row, tl.where(owned, page.to(tl.int64) * PAGE + position % PAGE, -1), mask=live)
    else:
        request = row // q_len
        position = tl.load(prefix_lens + request, mask=live, other=0) + tail_len - q_len + row % q_len
        page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE, mask=live, other=0)
        # 64-bit: page · P passes 2**31 in a large pool (vllm#47671).
        tl.store(slot_mapping + row, page.to(tl.int64) * PAGE + position % PAGE, mask=live)

    if pid * BLOCK_PIECES < pieces:
        if RAGGED:
            slots = tl.load(q_indptr + index + 1, mask=exists, other=0) - tl.load(
                q_indptr + index, mask=exists, other=0
            )
        else:
            slots = tail_len + index * 0
        first, end = tile_range(
            tl.load(prefix_lens + index, mask=exists, other=0), slots, window_left, BLOCK_N, WINDOW, RAGGED
        )
        length = tl.where(exists, end - first + surplus(slots, ITEM_COST, RAGGED), 0)
        upto = running_total(length)
        begin, line = upto - length, total(length, 0)
        number = pid * BLOCK_PIECES + tl.arange(0, BLOCK_PIECES)
        start, share = piece(line, number, pieces)
        write_pieces(work, number, start, share, pieces, first, begin, length, exists, index)
        if pid == 0:
            holder = begun_before(begin + 1, line, pieces) - 1
            parts = begun_before(begin + end - first, line, pieces) - holder
            held_from, _ = piece(line, holder, pieces)
            is_cut = exists & (end > first) & (parts > 1)
            write_cuts(work, pieces, is_cut, index, holder, parts, held_from < begin)


HEADER = tl.constexpr(4)
"""Words of `row_tiles` before the first row tile: `tiling.AGENDA_ROWS` rows of two."""


@inline
def row_tile_of(entry, height, exists, index):
    """Request and index of row tiles by their number, of requests that have so many each; a request's last one comes
    first. Behind the last row tile the request is the one behind the last, and the index means nothing.
    """
    upto = running_total(height)
    passed = (upto[None, :] <= entry[:, None]) & exists[None, :]
    request = total(passed.to(tl.int32), 1)
    reached = index[None, :] <= request[:, None]
    last = total(tl.where(reached, tl.broadcast_to(height[None, :], passed.shape), 0), 1) - 1
    return request, last - entry


@inline
def turn_of(
    request, m, here, index, keys, prefixes, height, prefix_lens, q_indptr, together, group, BLOCK_M: tl.constexpr
):
    """When row tiles are taken that are taken whole: the longest first, so that no long one is begun last.

    Those of one request stay together, for they read the same keys, and the longest request comes first; or all are
    in one order. Of equal ones a lower request's come first.

    Args:
        request, m, here: of row tiles, their request, their index, and whether they are any. index, keys, prefixes,
            height: of requests, their number, their keys in all and before their rows, their row tiles. together:
            whether L2 has room for the keys of all requests.
    """
    before = (index[None, :] < request[:, None]).to(tl.int32)
    prefix_len = tl.load(prefix_lens + request, mask=here, other=0)
    if together:
        # Keys times the group, of which there are few where it is asked.
        seen = (prefix_len[:, None] - prefixes[None, :]) * group + (m[:, None] + 1) * BLOCK_M
        behind = tl.minimum(tl.maximum((seen - before) // BLOCK_M, 0), height[None, :])
        turn = total(height[None, :] - behind, 1)
    else:
        rows = tl.load(q_indptr + request + 1, mask=here, other=0) - tl.load(q_indptr + request, mask=here, other=0)
        is_ahead = keys[None, :] + before > (prefix_len + rows)[:, None]
        turn = total(tl.where(is_ahead, height[None, :], 0), 1) + (rows * group + BLOCK_M - 1) // BLOCK_M - 1 - m
    return turn


@inline
def pieces_of(line, tiles, high, pieces, LEAST_SHARE: tl.constexpr):
    """Into how many pieces a line of row tiles is cut.

    Pieces of requests of one height are as many for each row tile of a request (`split.in_line`).

    Args:
        line: length of all row tiles of a KV head. tiles, high: row tiles, and those of a request, 1 where they differ.
    """
    made = tl.minimum(tl.maximum(line // LEAST_SHARE, tiles), pieces)
    level = made // high * high
    return tl.maximum(tl.where(8 * level >= 7 * made, level, made), 1)


@inline
def pays_cutting(line, longest, tiles, programs, num_kv_heads, ONCE: tl.constexpr):
    """Whether row tiles that are cut take less time than those that are taken whole, one by one (`tiling.pays_cutting`
    says the same). Of more row tiles than programs the host has said so. NOTES.md has the measurements.

    Args:
        line, longest: length of all row tiles of a KV head, and of the longest. programs: that the device holds at a
            time. ONCE: `tiling.cut_costs`.
    """
    share = (line * num_kv_heads + programs - 1) // programs
    return (tiles * num_kv_heads > programs) | (3 * share // 2 + ONCE < longest)


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_rows",
        "num_tiles",
        "num_kv_heads",
        "room",
        "stride_table",
        "pieces",
        "programs",
    ]
)
def write_ragged(
    prefix_lens,
    q_indptr,
    page_table,
    given_slots,
    slot_mapping,
    row_tiles,
    work,
    num_reqs,
    num_rows,
    num_tiles,
    group,
    num_kv_heads,
    room,
    stride_table,
    pieces,
    programs,
    window_left,
    PAGE: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    ITEM_COST: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    ONCE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    """A ragged causal batch (EXTEND): request r brings q_indptr[r+1] - q_indptr[r] rows.

    Args:
        slot_mapping: int64 ``[num_rows]``, out.
        row_tiles: int32 ``[2 + num_tiles, 2]``, out: how many row tiles of how many heads were taken, 0 now, and how
            many row tiles there are; how many KV heads are worked on side by side, and 0 where row tiles are whole, or
            `high` of the line that they are cut from (`split.in_line`); then request and index of a row tile, request
            -1 where there is none. Where they are whole, the longest come first (`turn_of`); where they may be CUT, a
            request's last one does.
        work: int32 ``[2 · pieces, 4]``, out, if row tiles may be CUT: of those in line, as `write_uniform` has it of
            requests; all idle where they are taken whole. A piece is no shorter than LEAST_SHARE, unless as many row
            tiles are.
        room: keys of one KV head that L2 has room for, so that programs find there what others have read.
    """
    pid = tl.program_id(0)
    entry = pid * BLOCK + tl.arange(0, BLOCK)
    index = tl.arange(0, BLOCK_R)
    exists = index < num_reqs
    begin = tl.load(q_indptr + index, mask=exists, other=0)
    end = tl.load(q_indptr + index + 1, mask=exists, other=0)

    live = entry < num_rows
    if GIVEN:
        tl.store(slot_mapping + entry, tl.load(given_slots + entry, mask=live, other=-1), mask=live)
    else:
        owner = total(((end[None, :] <= entry[:, None]) & exists[None, :]).to(tl.int32), 1)
        owner = tl.minimum(owner, num_reqs - 1)
        position = tl.load(prefix_lens + owner, mask=live, other=0) + entry
        position -= tl.load(q_indptr + owner, mask=live, other=0)
        page = tl.load(page_table + owner.to(tl.int64) * stride_table + position // PAGE, mask=live, other=0)
        tl.store(slot_mapping + entry, page.to(tl.int64) * PAGE + position % PAGE, mask=live)

    height = ((end - begin) * group + BLOCK_M - 1) // BLOCK_M
    request, m = row_tile_of(entry, height, exists, index)
    here = request < num_reqs
    prefixes = tl.load(prefix_lens + index, mask=exists, other=0)
    keys = tl.where(exists & (height > 0), prefixes + end - begin, 0)
    turn = entry
    if not CUT:  # noqa: SIM102
        if (num_reqs > 1) & (pid * BLOCK < num_tiles):
            together = total(keys, 0) <= room // num_kv_heads
            turn = turn_of(
                request, m, here, index, keys, prefixes, height, prefix_lens, q_indptr, together, group, BLOCK_M
            )
            turn = tl.where(here, turn, entry)
    tile = row_tiles + HEADER + turn * 2
    tl.store(tile, tl.where(here, request, -1), mask=entry < num_tiles)
    tl.store(tile + 1, tl.where(here, m, 0), mask=entry < num_tiles)
    cut_from = pid * 0
    if CUT:  # noqa: SIM102
        if pid * BLOCK_PIECES < pieces:
            item = tl.arange(0, BLOCK_TILES)
            count, high = total(height, 0), tl.maximum(largest(height, 0), 1)
            high = tl.where(high * num_reqs == count, high, 1)
            of, which = row_tile_of(in_line(item, count, high), height, exists, index)
            is_one = of < num_reqs
            rows = tl.load(q_indptr + of + 1, mask=is_one, other=0) - tl.load(q_indptr + of, mask=is_one, other=0)
            prefix_len = tl.load(prefix_lens + of, mask=is_one, other=0)
            first, stop = tiles_of(which, rows, prefix_len, group, window_left, BLOCK_M, BLOCK_N, WINDOW)
            length = tl.where(is_one, stop - first + ITEM_COST, 0)
            line = tl.maximum(total(length, 0), 1)
            made = pieces_of(line, count, high, pieces, LEAST_SHARE)
            pays = pays_cutting(line, largest(length, 0), count, programs, num_kv_heads, ONCE)
            by_line = pays & (line // LEAST_SHARE > count)
            number = pid * BLOCK_PIECES + tl.arange(0, BLOCK_PIECES)
            place = running_total(length) - length
            start = tl.minimum(number, made) * line // made
            share = tl.where(by_line, tl.minimum(number + 1, made) * line // made - start, 0)
            write_pieces(work, number, start, share, pieces, first, place, length, is_one, item)
            cut_from = tl.where(by_line, high, 0)
            if pid == 0:
                holder = ((place + 1) * made + line - 1) // line - 1
                parts = ((place + stop - first) * made + line - 1) // line - holder
                is_cut = is_one & (parts > 1) & by_line
                write_cuts(work, pieces, is_cut, item, holder, parts, holder * line // made < place)
    if pid == 0:
        side_by_side = tl.maximum(room // tl.maximum(largest(keys, 0), 1), 1)
        rounds = (num_kv_heads + side_by_side - 1) // side_by_side
        tl.store(row_tiles, 0)
        tl.store(row_tiles + 1, total(height, 0))
        tl.store(row_tiles + 2, (num_kv_heads + rounds - 1) // rounds)
        tl.store(row_tiles + 3, cut_from)
