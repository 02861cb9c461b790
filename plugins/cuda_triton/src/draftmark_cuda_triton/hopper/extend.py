"""Ragged causal attention (EXTEND) on Hopper: the row tiles of `kernels.extend`, 128 packed rows each.

Two warp groups share a ring: of K and V half as much crosses from L2 as for tiles of 64 rows, and while one group has
its softmax the other has the tensor cores. Programs stay, and take row tiles as they get free (`agenda`); the rows of q
of the next one travel while a result is stored. Worked size, 8 requests x 4096 tokens, 32 heads of 128: 1.1 TFLOP,
1.4 ms at 790 TFLOP/s; 8.6 GB through L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .agenda import first_item, hear_next, make_agenda, seen_by, take, tell_item
from .bring import bring_tiles
from .constants import constants, leavers, parts_of, scores_of, takes_turns
from .fetch import leads
from .fold import fold_tiles, give_turn, shared_out
from .mask import CAUSAL, View
from .ring import launch_dependents, make_ring, make_room, of_slot
from .roles import start
from .rows import apart, inverse_of, load_rows, put_rows, store_rows
from .softmax import sink_mass
from .uniform import store_sums


@gluon.jit
def bring_ragged(given, WHAT: gl.constexpr, C: gl.constexpr):
    """The tiles of a program's row tiles: what a fetching warp brings, or a warp group gathers or widens."""
    (
        work, row_tiles, prefix_lens, q_indptr, page_table, k_source, v_source, fetched, ring, agenda, group,
        num_kv_heads, pieces, window_left, stride_table, num_pages,
    ) = given  # fmt: skip
    TAKES: gl.constexpr = leads(WHAT)
    inverse = inverse_of(group)
    tiles, together = gl.load(row_tiles + 1), gl.load(row_tiles + 2)
    batch = (row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, inverse, window_left)
    at, turn = tiles * 0, tiles * 0
    place = (tiles * 0, tiles * 0, tiles * 0, tiles * 0)
    if TAKES:
        number, behind, by_line = first_item(work, row_tiles, pieces, num_kv_heads, C)
        item, span, behind, at, turn = tell_item(number, behind, by_line, batch, agenda, at, turn, C)
    else:
        item, span, at, turn = hear_next(agenda, at, turn, C)
    while item.rows > 0:
        page_row, head = page_table + item.request.to(gl.int64) * stride_table, item.head
        kv_len = item.prefix_len + item.rows
        if C.CUT:
            first, stop = span.first, span.stop
        else:
            first, stop = seen_by(item, group, inverse, window_left, C)
        # The next item of a piece is this program's whenever it is looked up: beside the tiles of this one.
        if TAKES and C.CUT:
            if by_line == 0:
                number = take(row_tiles, tiles * num_kv_heads)
            item, span, behind, at, turn = tell_item(number, behind, by_line, batch, agenda, at, turn, C)
        place = bring_tiles(
            k_source, v_source, fetched, ring, place, page_row, head, first, stop, kv_len, num_pages, WHAT, C
        )  # fmt: skip
        if TAKES and not C.CUT:
            number = take(row_tiles, tiles * num_kv_heads)
            item, span, behind, at, turn = tell_item(number, behind, by_line, batch, agenda, at, turn, C)
        elif not TAKES:
            item, span, at, turn = hear_next(agenda, at, turn, C)


@gluon.jit
def queries_of(q, item, group, inverse, stride_row, stride_head, MEMBER: gl.constexpr, C: gl.constexpr):
    """A warp group's rows of q of an item on their way to registers; of no item none, for it has no rows."""
    return load_rows(
        q, item.begin + item.row, item.skipped + MEMBER * 64, (item.rows - item.row) * group, item.head, group, inverse,
        stride_row, stride_head, C,
    )  # fmt: skip


@gluon.jit
def store_whole(given, C: gl.constexpr):
    """What a warp group has of rows that saw all of their keys: out, and the logarithm of their mass."""
    (
        own_q, acc, top, mass, row_live, cells, out, lse, begin, first, count, head, group, inverse, stride_row,
        stride_head,
    ) = given  # fmt: skip
    store_rows(own_q, acc, out, begin, first, count, head, group, inverse, stride_row, stride_head, C)
    if C.WITH_LSE:
        log_mass = gl.where(mass > 0, (top + gl.log2(mass)) * 0.6931471805599453, float("-inf"))
        gl.store(lse + cells, log_mass, mask=row_live)


@gluon.jit
def fold_ragged(given, MEMBER: gl.constexpr, C: gl.constexpr):
    """Warp group MEMBER: 64 packed rows of one row tile."""
    (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, row_tiles, prefix_lens, q_indptr, q_ring, ring,
        agenda, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
        stride_out_head,
    ) = given  # fmt: skip
    at, turn = num_kv_heads * 0, num_kv_heads * 0
    slot, phase = num_kv_heads * 0, num_kv_heads * 0
    if takes_turns(C) and MEMBER == 1:
        give_turn(MEMBER)
    k_factor = 1.0
    v_factor = 1.0
    if C.SCALED & 1:
        k_factor = gl.load(k_scale)
    if C.SCALED & 2:
        v_factor = gl.load(v_scale)
    own_q = of_slot(q_ring, MEMBER)
    lane = MEMBER * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_of(C)))
    inverse = inverse_of(group)
    item, span, at, turn = hear_next(agenda, at, turn, C)
    queries = queries_of(q, item, group, inverse, stride_q_row, stride_q_head, MEMBER, C)
    while item.rows > 0:
        head, first_row, skipped, begin = item.head, item.row, item.skipped, item.begin
        rows, prefix_len = item.rows, item.prefix_len
        put_rows(own_q, queries, C)
        row, member = apart(skipped + lane, group, inverse)
        row += first_row
        row_live = row < rows
        if C.CUT:
            first, stop, where = span.first, span.stop, span.where
        else:
            first, stop = seen_by(item, group, inverse, window_left, C)
        lowest, _ = apart(skipped + MEMBER * 64, group, inverse)
        last, _ = apart(skipped + MEMBER * 64 + 63, group, inverse)
        clear = gl.minimum(prefix_len + first_row + lowest + 1, prefix_len + rows) // C.BLOCK_N
        highest = prefix_len + gl.minimum(first_row + last, rows - 1)
        # Rows of EXTEND are no tree: there are neither words nor depths.
        view = View(
            prefix_len=prefix_len, tail_len=rows, slot_of_row=row, row_position=prefix_len + row, row_live=row_live,
            row_words=row_tiles + row * 0, depths=row_tiles, mask_words=0, window_left=window_left, highest=highest,
            clear=clear,
        )  # fmt: skip
        acc, top, mass, slot, phase = fold_tiles(
            own_q, ring, slot, phase, first, stop, view, scale * k_factor, cap, C, MEMBER
        )  # fmt: skip
        # The next rows of q travel while these are stored.
        item, span, at, turn = hear_next(agenda, at, turn, C)
        queries = queries_of(q, item, group, inverse, stride_q_row, stride_q_head, MEMBER, C)
        weight = mass
        if C.SINKS:
            is_counted = row_live
            if C.CUT:
                is_counted = row_live & (where == 0)
            weight += sink_mass(sinks, head * group + member, is_counted, top)
        share = v_factor / gl.where(weight > 0, weight, 1.0)
        acc = shared_out(acc, share)
        cells = (begin + row) * (num_kv_heads * group) + head * group + member
        result = (
            own_q, acc, top, mass, row_live, cells, out, lse, begin + first_row, skipped + MEMBER * 64,
            (rows - first_row) * group, head, group, inverse, stride_out_row, stride_out_head,
        )  # fmt: skip
        if C.CUT:
            if where == 0:
                store_whole(result, C)
            else:
                block = ((where - 1) * num_kv_heads + head) * C.BLOCK_M + lane
                gl.store(partial_lse + block, gl.where(mass > 0, top + gl.log2(mass), float("-inf")), mask=row_live)
                for part in gl.static_range(parts_of(C)):
                    store_sums(
                        acc[part], partial_out, block, row_live, skipped + MEMBER * 64, group, inverse, part, C
                    )  # fmt: skip
        else:
            store_whole(result, C)


@gluon.jit(do_not_specialize=["group", "num_kv_heads", "window_left", "stride_table", "num_pages", "pieces"])
def attend_ragged(
    q, k_source, v_source, k_other, v_other, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work,
    row_tiles, prefix_lens, q_indptr, page_table, group, num_kv_heads, window_left, scale, cap, stride_q_row,
    stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages, pieces, PAGE: gl.constexpr,
    MEMBERS: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr,
    CUT: gl.constexpr, ITEM_COST: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
    WIDEN: gl.constexpr, OVERLAP: gl.constexpr, REGISTERS: gl.constexpr, REST: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """As `kernels.extend.attend_ragged`; k_source, v_source, k_other and v_other as of `uniform.attend_uniform`."""
    C: gl.constexpr = constants(
        PAGE=PAGE, BLOCK_M=64 * MEMBERS, BLOCK_N=BLOCK_N, BOX=BOX, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, REST=REST,
        STAGES=STAGES, DEPTH=DEPTH, TAIL=CAUSAL, RAGGED=True, WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS,
        WITH_LSE=WITH_LSE, ITEM_COST=ITEM_COST, OVERLAP=OVERLAP, MEMBERS=MEMBERS, STEP=STEP, CUT=CUT,
    )  # fmt: skip
    q_ring = make_room(q.dtype.element_ty, MEMBERS, 64, C)
    ring = make_ring(q.dtype.element_ty, leavers(C), STAGES, C, WHOLE=k_other is not None and REST == 0)
    # What is fetched: the ring itself, or e4m3 that a further warp group widens into it.
    fetched = ring
    if WIDEN:
        fetched = make_ring(k_source.dtype, 1, DEPTH, C)
    agenda = make_agenda(MEMBERS + WIDEN + 1, C)
    if PDL:
        launch_dependents()
    bring = (
        work, row_tiles, prefix_lens, q_indptr, page_table, (k_source, k_other), (v_source, v_other), fetched, ring,
        agenda, group, num_kv_heads, pieces, window_left, stride_table, num_pages,
    )  # fmt: skip
    fold = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, row_tiles, prefix_lens, q_indptr, q_ring, ring,
        agenda, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
        stride_out_head,
    )  # fmt: skip
    start(fold_ragged, fold, bring_ragged, bring, C, WIDEN, REGISTERS)
