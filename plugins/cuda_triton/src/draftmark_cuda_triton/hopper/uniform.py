"""Few rows a request on Hopper: the schedule, the partials and the merge of `kernels.uniform`, other hands.

Bytes and floor are those of `kernels.uniform`: 64 requests x 8192, 8 KV heads of 128, bf16: 2.15 GB, 477 µs.
Of shared memory a program takes 64 rows of q for each warp group and STAGES tiles of K and V: 16 + 3 · 32 KiB for
one group, two programs on a multiprocessor; 32 + 6 · 32 KiB for two groups, one program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .bring import bring_tiles
from .constants import brings_ahead, constants, first_of, leavers, parts_of, scores_of, takes_turns
from .fold import fold_tiles, give_turn, shared_out
from .mask import CAUSAL, TREE, View
from .ring import launch_dependents, make_ring, make_room, of_slot
from .roles import start
from .rows import (
    apart,
    bring_rows,
    cells_of,
    columns_of,
    inverse_of,
    load_rows,
    put_rows,
    rows_between,
    store_rows,
)
from .softmax import sink_mass

BLOCK = gl.constexpr(2)


@gluon.jit
def rows_of(q_indptr, request, q_len, tail_len, RAGGED: gl.constexpr):
    """First row, rows and tail slots of a request; see `kernels.split.rows_of`."""
    begin, rows, slots = request * q_len, q_len, tail_len
    if RAGGED:
        begin = gl.load(q_indptr + request)
        rows = gl.load(q_indptr + request + 1) - begin
        slots = rows
    return begin, rows, slots


@gluon.jit
def tile_range(prefix_len, tail_len, window_left, C: gl.constexpr):
    """First tile of a request and the one past the last; see `kernels.split.tile_range`."""
    end = (prefix_len + tail_len + C.BLOCK_N - 1) // C.BLOCK_N
    if C.RAGGED:
        end = gl.where(tail_len > 0, end, 0)
    first = end * 0
    if C.WINDOW:
        first = gl.minimum(gl.maximum(prefix_len - window_left, 0) // C.BLOCK_N, end)
    return first, end


@gluon.jit
def row_tiles_of(group, C: gl.constexpr):
    """The query rows in which the row tile of a program begins, of even requests and of odd ones, whose row tiles are
    counted from the last: later ones see more of a tail, and who has had the most of one has the least of the next.
    """
    m = gl.program_id(0)
    return m * C.BLOCK_M // group, (gl.num_programs(0) - 1 - m) * C.BLOCK_M // group


@gluon.jit
def row_tile_of(request, row_tiles, C: gl.constexpr):
    """The first packed row of a program's row tile of a request, and the query row in which it begins."""
    near, far = row_tiles
    m, is_near = gl.program_id(0), request % 2 == 0
    return gl.where(is_near, m, gl.num_programs(0) - 1 - m) * C.BLOCK_M, gl.where(is_near, near, far)


@gluon.jit
def stop_of(tile, left, end, prefix_len, tail_len, rows, last_row, C: gl.constexpr):
    """One past the last tile that a row tile folds of a piece; see `kernels.split.stop_of`."""
    stop = gl.minimum(tile + left, end)
    if C.TAIL != BLOCK:
        seen = prefix_len + tail_len - rows + gl.minimum(last_row, rows - 1) + 1
        stop = gl.minimum(stop, gl.maximum((seen + C.BLOCK_N - 1) // C.BLOCK_N, tile + 1))
    return stop


@gluon.jit
def surplus(tail_len, C: gl.constexpr):
    """What a request costs beside its tiles; see `kernels.split.surplus`."""
    cost = C.ITEM_COST
    if C.RAGGED:
        cost = gl.where(tail_len > 0, C.ITEM_COST, 0)
    return cost


@gluon.jit
def bring_uniform(given, WHAT: gl.constexpr, C: gl.constexpr):
    """The tiles of a piece, request after request: what a fetching warp brings, or a warp group gathers or widens."""
    (
        work, prefix_lens, q_indptr, page_table, k_source, v_source, fetched, ring, q_len, tail_len, group,
        window_left, stride_table, num_pages,
    ) = given  # fmt: skip
    head, number = gl.program_id(1), gl.program_id(2)
    request = gl.load(work + number * 4)
    tile = gl.load(work + number * 4 + 1)
    left = gl.load(work + number * 4 + 2)
    inverse, row_tiles = inverse_of(group), row_tiles_of(group, C)
    place = (left * 0, left * 0, left * 0, left * 0)
    while left > 0:
        prefix_len = gl.load(prefix_lens + request)
        _, rows, slots = rows_of(q_indptr, request, q_len, tail_len, C.RAGGED)
        _, end = tile_range(prefix_len, slots, window_left, C)
        packed, first_row = row_tile_of(request, row_tiles, C)
        if (tile < end) & (packed < rows * group):
            final, _ = apart(packed - first_row * group + C.BLOCK_M - 1, group, inverse)
            stop = stop_of(tile, left, end, prefix_len, slots, rows, first_row + final, C)
            page_row = page_table + request.to(gl.int64) * stride_table
            place = bring_tiles(
                k_source, v_source, fetched, ring, place, page_row, head, tile, stop, prefix_len + slots, num_pages,
                WHAT, C,
            )  # fmt: skip
        left -= end + surplus(slots, C) - tile
        request += 1
        if left > 0:
            _, _, slots = rows_of(q_indptr, request, q_len, tail_len, C.RAGGED)
            tile, end = tile_range(gl.load(prefix_lens + request), slots, window_left, C)


@gluon.jit
def store_sums(acc, partial_out, cell, row_live, skipped, group, inverse, part: gl.constexpr, C: gl.constexpr):
    """A warp group's sums to the cells of its packed rows, of a part of its columns."""
    sums: gl.constexpr = acc.type.layout
    at = gl.convert_layout(cell, gl.SliceLayout(1, sums)).to(gl.int64)
    live = gl.convert_layout(row_live.to(gl.int32), gl.SliceLayout(1, sums)) != 0
    col = first_of(C, part) + gl.arange(0, acc.shape[1], gl.SliceLayout(0, sums))
    lane = skipped + gl.arange(0, 64, gl.SliceLayout(1, sums))
    own, there = columns_of(lane, col, group, inverse, C)
    gl.store(partial_out + at[:, None] * C.HEAD_DIM + own, acc, mask=live[:, None] & there)


@gluon.jit
def next_of(
    q, prefix_lens, q_indptr, request, is_one, q_len, tail_len, head, row_tiles, group, inverse, stride_row,
    stride_head, MEMBER: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """What a request is, prefix, first row, rows and tail slots; and a warp group's rows of q on their way to
    registers, if they are brought ahead.

    Args:
        is_one: whether the piece has this request; else there are no rows.
    """
    request = gl.where(is_one, request, 0)
    begin, rows, slots = rows_of(q_indptr, request, q_len, tail_len, C.RAGGED)
    queries = ()
    if brings_ahead(C):
        packed, first_row = row_tile_of(request, row_tiles, C)
        skipped = packed - first_row * group + MEMBER * 64
        count = gl.where(is_one, (rows - first_row) * group, 0)
        queries = load_rows(q, begin + first_row, skipped, count, head, group, inverse, stride_row, stride_head, C)
    return gl.load(prefix_lens + request), begin, rows, slots, queries


@gluon.jit
def fold_uniform(given, MEMBER: gl.constexpr, C: gl.constexpr):
    """Warp group MEMBER: 64 of the program's packed rows, for every request of a piece."""
    (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_ring, ring, q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row,
        stride_q_head, stride_out_row, stride_out_head,
    ) = given  # fmt: skip
    head, number, num_kv_heads = gl.program_id(1), gl.program_id(2), gl.num_programs(1)
    request = gl.load(work + number * 4)
    tile = gl.load(work + number * 4 + 1)
    left = gl.load(work + number * 4 + 2)
    lane = gl.arange(0, 64, gl.SliceLayout(1, scores_of(C)))
    inverse, row_tiles = inverse_of(group), row_tiles_of(group, C)
    own_q = of_slot(q_ring, MEMBER)
    k_factor = 1.0
    v_factor = 1.0
    if C.SCALED & 1:
        k_factor = gl.load(k_scale)
    if C.SCALED & 2:
        v_factor = gl.load(v_scale)
    slot = left * 0
    phase = left * 0
    half = left * 0
    if takes_turns(C) and MEMBER == 1:
        give_turn(MEMBER)
    prefix_len, begin, rows, slots, queries = next_of(
        q, prefix_lens, q_indptr, request, left > 0, q_len, tail_len, head, row_tiles, group, inverse, stride_q_row,
        stride_q_head, MEMBER, C,
    )  # fmt: skip
    while left > 0:
        first, end = tile_range(prefix_len, slots, window_left, C)
        after = left - (end + surplus(slots, C) - tile)
        packed, first_row = row_tile_of(request, row_tiles, C)
        if (tile < end) & (packed < rows * group):
            skipped = packed - first_row * group
            final, _ = apart(skipped + C.BLOCK_M - 1, group, inverse)
            skipped += MEMBER * 64
            lowest, _ = apart(skipped, group, inverse)
            last, _ = apart(skipped + 63, group, inverse)
            row, member = apart(skipped + lane, group, inverse)
            row += first_row
            here, count = begin + first_row, (rows - first_row) * group
            if brings_ahead(C):
                put_rows(own_q, queries, C)
            else:
                bring_rows(own_q, q, here, skipped, count, head, group, inverse, stride_q_row, stride_q_head, C)
            stop = stop_of(tile, left, end, prefix_len, slots, rows, first_row + final, C)
            seen_by_all = prefix_len
            if C.TAIL == CAUSAL:
                seen_by_all = prefix_len + slots - rows + first_row + lowest + 1
            # A tile with room behind the last key is masked whatever its rows see.
            clear = gl.minimum(seen_by_all, prefix_len + slots) // C.BLOCK_N
            if C.TAIL == BLOCK:
                clear = (prefix_len + slots) // C.BLOCK_N
            row_live = row < rows
            slot_of_row = slots - rows + row
            row_position = prefix_len + slot_of_row
            highest = prefix_len + slots - rows + gl.minimum(first_row + last, rows - 1)
            depths = tail_depth + (begin if C.RAGGED else request * tail_len)
            if C.TAIL == TREE and C.WINDOW:
                row_position = prefix_len + gl.load(depths + slot_of_row, mask=row_live, other=0)
                highest = gl.max(row_position, 0)
            row_words = tail_mask + (begin + row).to(gl.int64) * mask_words
            view = View(
                prefix_len=prefix_len, tail_len=slots, slot_of_row=slot_of_row, row_position=row_position,
                row_live=row_live, row_words=row_words, depths=depths, mask_words=mask_words, window_left=window_left,
                highest=highest, clear=clear,
            )  # fmt: skip
            acc, top, mass, slot, phase = fold_tiles(
                own_q, ring, slot, phase, tile, stop, view, scale * k_factor, cap, C, MEMBER
            )  # fmt: skip
            # A piece in which a row sees nothing weighs nothing: out 0, lse -inf, never 0/0.
            log_mass = gl.where(mass > 0, top + gl.log2(mass), float("-inf"))
            whole = (tile == first) & (tile + left >= end)
            cell = (begin + row) * (num_kv_heads * group) + head * group + member
            block = ((number * 2 + half) * num_kv_heads + head) * gl.num_programs(0) * C.BLOCK_M
            block += packed + MEMBER * 64 + lane
            # The next rows of q travel while these are stored.
            prefix_len, begin, rows, slots, queries = next_of(
                q, prefix_lens, q_indptr, request + 1, after > 0, q_len, tail_len, head, row_tiles, group, inverse,
                stride_q_row, stride_q_head, MEMBER, C,
            )  # fmt: skip
            if C.SINKS:
                mass += sink_mass(sinks, head * group + member, row_live & whole, top)
            share = v_factor / gl.where(mass > 0, mass, 1.0)
            acc = shared_out(acc, share)
            if whole:
                store_rows(
                    own_q, acc, out, here, skipped, count, head, group, inverse, stride_out_row, stride_out_head, C
                )  # fmt: skip
                if C.WITH_LSE:
                    gl.store(lse + cell, log_mass * 0.6931471805599453, mask=row_live)
            else:
                gl.store(partial_lse + block, log_mass, mask=row_live)
                for part in gl.static_range(parts_of(C)):
                    store_sums(acc[part], partial_out, block, row_live, skipped, group, inverse, part, C)
        else:
            prefix_len, begin, rows, slots, queries = next_of(
                q, prefix_lens, q_indptr, request + 1, after > 0, q_len, tail_len, head, row_tiles, group, inverse,
                stride_q_row, stride_q_head, MEMBER, C,
            )  # fmt: skip
        half = half * 0 + 1
        left = after
        request += 1
        tile, _ = tile_range(prefix_len, slots, window_left, C)


@gluon.jit
def clear_rows(out, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, C: gl.constexpr):
    """Zeros in the rows behind the last request's, for the query heads of one KV head."""
    head, number, pieces = gl.program_id(1), gl.program_id(2), gl.num_programs(2)
    inverse = inverse_of(group)
    for packed in range(gl.load(q_indptr + num_reqs) * group + number * 64, num_rows * group, pieces * 64):
        row = packed // group
        for part in gl.static_range(parts_of(C)):
            at, own, there = cells_of(packed - row * group, (num_rows - row) * group, group, inverse, part, C)
            pointers = rows_between(out, row, at, own, head, group, inverse, stride_out_row, stride_out_head, C)
            gl.store(pointers, gl.full(there.shape, 0.0, out.dtype.element_ty, there.type.layout), mask=there)


@gluon.jit(
    do_not_specialize=[
        "q_len",
        "tail_len",
        "num_reqs",
        "num_rows",
        "group",
        "mask_words",
        "window_left",
        "stride_table",
        "num_pages",
    ]
)
def attend_uniform(
    q, k_source, v_source, k_other, v_other, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work,
    prefix_lens, q_indptr, page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words,
    window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE: gl.constexpr, MEMBERS: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, TAIL: gl.constexpr, RAGGED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr, ITEM_COST: gl.constexpr, PDL: gl.constexpr,
    STAGES: gl.constexpr, DEPTH: gl.constexpr, WIDEN: gl.constexpr, OVERLAP: gl.constexpr, REGISTERS: gl.constexpr,
    HEADS: gl.constexpr, REST: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """As `kernels.uniform.attend_uniform`; k_source and v_source are descriptors ``[pages, P, heads, dim]``.

    k_other, v_other: None; or of the columns of a tile's second part; or where heads come whole of the last keys, all
    of ``[pages, P / 8, 2 · heads, 8, dim / 2]``. HEADS: of which as many are one head of as many times the dim, that
    has the queries of all.
    """
    C: gl.constexpr = constants(
        PAGE=PAGE, BLOCK_M=64 * MEMBERS, BLOCK_N=BLOCK_N, BOX=BOX, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, REST=REST,
        STAGES=STAGES, DEPTH=DEPTH, TAIL=TAIL, RAGGED=RAGGED, WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS,
        WITH_LSE=WITH_LSE, ITEM_COST=ITEM_COST, OVERLAP=OVERLAP, MEMBERS=MEMBERS, HEADS=HEADS, STEP=STEP,
    )  # fmt: skip
    q_ring = make_room(q.dtype.element_ty, MEMBERS, 64, C)
    ring = make_ring(q.dtype.element_ty, leavers(C), STAGES, C, WHOLE=k_other is not None and REST == 0)
    # What is fetched: the ring itself, or e4m3 that a further warp group widens into it.
    fetched = ring
    if WIDEN:
        fetched = make_ring(k_source.dtype, 1, DEPTH, C)
    if PDL:
        # Barriers were made while the grid before this one ran.
        launch_dependents()
    if RAGGED and gl.program_id(0) == 0:
        clear_rows(out, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, C)
    bring = (
        work, prefix_lens, q_indptr, page_table, (k_source, k_other), (v_source, v_other), fetched, ring, q_len,
        tail_len, group, window_left, stride_table, num_pages,
    )  # fmt: skip
    fold = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_ring, ring, q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row,
        stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    start(fold_uniform, fold, bring_uniform, bring, C, WIDEN, REGISTERS)
