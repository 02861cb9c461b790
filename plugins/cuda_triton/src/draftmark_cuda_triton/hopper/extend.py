"""Ragged causal attention (EXTEND) on Hopper: the row tiles of `kernels.extend`, 128 packed rows each.

Two warp groups share a ring: of K and V half as much crosses from L2 as for tiles of 64 rows, and while one group has
its softmax the other has the tensor cores. Programs stay, and take row tiles as they get free (`agenda`); the rows of q
of the next one travel while a result is stored. Worked size, 8 requests x 4096 tokens, 32 heads of 128: 1.1 TFLOP,
1.4 ms at 790 TFLOP/s; 8.6 GB through L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .agenda import hear_next, looked_up, make_agenda, take, tell_next
from .bring import bring_tiles
from .fetch import (
    CROWDED_REGISTERS,
    FETCH_REGISTERS,
    KEYS,
    VALUES,
    WIDEN_REGISTERS,
    WIDENED,
    leads,
)
from .fold import fold_tiles, give_turn, takes_turns
from .mask import CAUSAL
from .ring import make_ring, make_rows
from .rows import apart, inverse_of, load_rows, put_rows, store_rows
from .softmax import sink_mass


@gluon.jit
def tiles_of(row, skipped, prefix_len, rows, group, inverse, window_left, BLOCK_M: gl.constexpr,
             BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """First tile of keys that a row tile sees, and the one past the last."""
    first = row * 0
    if WINDOW:
        first = gl.maximum(prefix_len + row - window_left, 0) // BLOCK_N
    last, _ = apart(skipped + BLOCK_M - 1, group, inverse)
    highest = gl.minimum(row + last, rows - 1)
    return first, (prefix_len + highest + BLOCK_N) // BLOCK_N


@gluon.jit
def bring_ragged(
    given, WHAT: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
    BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr = 0,
):  # fmt: skip
    """The tiles of a program's row tiles: what a fetching warp brings, or a warp group widens.

    HEAD_DIM: as in `bring_tiles`.
    """
    (
        row_tiles, prefix_lens, q_indptr, page_table, k_source, v_source, fetched, ring, agenda, group, num_kv_heads,
        window_left, stride_table, num_pages,
    ) = given  # fmt: skip
    TAKES: gl.constexpr = leads(WHAT)
    inverse = inverse_of(group)
    tiles, together = gl.load(row_tiles + 1), gl.load(row_tiles + 2)
    at, turn = tiles * 0, tiles * 0
    place = (tiles * 0, tiles * 0, tiles * 0, tiles * 0)
    if TAKES:
        found = looked_up(
            gl.program_id(0), row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, BLOCK_M
        )
        at, turn = tell_next(found, agenda, at, turn)
    else:
        found, at, turn = hear_next(agenda, at, turn)
    while found[5] > 0:
        request, head, row, skipped, _, rows, prefix_len = found
        first, stop = tiles_of(
            row, skipped, prefix_len, rows, group, inverse, window_left, BLOCK_M, BLOCK_N, WINDOW
        )  # fmt: skip
        page_row = page_table + request.to(gl.int64) * stride_table
        place = bring_tiles(
            k_source, v_source, fetched, ring, place, page_row, head, first, stop, prefix_len + rows, num_pages, WHAT,
            PAGE, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, DEPTH, STAGES,
        )  # fmt: skip
        if TAKES:
            item = take(row_tiles, tiles * num_kv_heads)
            found = looked_up(
                item, row_tiles, tiles, together, prefix_lens, q_indptr, num_kv_heads, group, BLOCK_M
            )  # fmt: skip
            at, turn = tell_next(found, agenda, at, turn)
        else:
            found, at, turn = hear_next(agenda, at, turn)


@gluon.jit
def queries_of(q, found, lane, group, inverse, stride_row, stride_head, HEAD_DIM: gl.constexpr,
               BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """A warp group's rows of q of an item on their way to registers; of no item none, for it has no rows."""
    _, head, first_row, skipped, begin, rows, _ = found
    packed = skipped + lane
    return load_rows(
        q, begin + first_row, packed, packed < (rows - first_row) * group, head, group, inverse, stride_row,
        stride_head, HEAD_DIM, BLOCK_D, moving,
    )  # fmt: skip


@gluon.jit
def fold_ragged(
    given, MEMBER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr,
    SINKS: gl.constexpr, WITH_LSE: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    ONE_BY_ONE: gl.constexpr = False,
):  # fmt: skip
    """Warp group MEMBER: 64 packed rows of one row tile."""
    (
        q, k_scale, v_scale, sinks, out, lse, row_tiles, prefix_lens, q_indptr, q_ring, ring, agenda, group,
        num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    ) = given  # fmt: skip
    TURNS: gl.constexpr = takes_turns(BLOCK_M // 64, OVERLAP, BLOCK_D)
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    moving: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    at, turn = num_kv_heads * 0, num_kv_heads * 0
    slot, phase = num_kv_heads * 0, num_kv_heads * 0
    if TURNS and MEMBER == 1:
        give_turn(MEMBER)
    k_factor = 1.0
    v_factor = 1.0
    if SCALED & 1:
        k_factor = gl.load(k_scale)
    if SCALED & 2:
        v_factor = gl.load(v_scale)
    own_q = q_ring.index(MEMBER)
    lane = MEMBER * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    moving_lane = MEMBER * 64 + gl.arange(0, 64, gl.SliceLayout(1, moving))
    inverse = inverse_of(group)
    found, at, turn = hear_next(agenda, at, turn)
    queries = queries_of(
        q, found, moving_lane, group, inverse, stride_q_row, stride_q_head, HEAD_DIM, BLOCK_D, moving
    )  # fmt: skip
    while found[5] > 0:
        _, head, first_row, skipped, begin, rows, prefix_len = found
        put_rows(own_q, queries)
        row, member = apart(skipped + lane, group, inverse)
        row += first_row
        row_live = row < rows
        first, stop = tiles_of(
            first_row, skipped, prefix_len, rows, group, inverse, window_left, BLOCK_M, BLOCK_N, WINDOW
        )  # fmt: skip
        lowest, _ = apart(skipped + MEMBER * 64, group, inverse)
        clear = gl.minimum(prefix_len + first_row + lowest + 1, prefix_len + rows) // BLOCK_N
        if WINDOW:
            clear = first
        view = (
            prefix_len, rows, row, prefix_len + row, row_live, row_tiles + row * 0, row_tiles, 0, window_left,
        )  # fmt: skip
        acc, top, mass, slot, phase = fold_tiles(
            own_q, ring, slot, phase, first, clear, stop, view, scale * k_factor, cap, BLOCK_N, BLOCK_D, BOX,
            CAUSAL, WINDOW, CAP, STAGES, OVERLAP, TURNS, MEMBER, ONE_BY_ONE, scores, output,
        )  # fmt: skip
        # The next rows of q travel while these are stored.
        found, at, turn = hear_next(agenda, at, turn)
        queries = queries_of(
            q, found, moving_lane, group, inverse, stride_q_row, stride_q_head, HEAD_DIM, BLOCK_D, moving
        )  # fmt: skip
        weight = mass
        if SINKS:
            weight += sink_mass(sinks, head * group + member, row_live, top)
        share = v_factor / gl.where(weight > 0, weight, 1.0)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, output))[:, None]
        moved = skipped + moving_lane
        store_rows(
            own_q, acc, out, begin + first_row, moved, moved < (rows - first_row) * group, head, group, inverse,
            stride_out_row, stride_out_head, HEAD_DIM, BLOCK_D, moving,
        )  # fmt: skip
        if WITH_LSE:
            log_mass = gl.where(mass > 0, (top + gl.log2(mass)) * 0.6931471805599453, float("-inf"))
            cell = (begin + row) * (num_kv_heads * group) + head * group + member
            gl.store(lse + cell, log_mass, mask=row_live)


@gluon.jit(do_not_specialize=["group", "num_kv_heads", "window_left", "stride_table", "num_pages"])
def attend_ragged(
    q, k_source, v_source, k_scale, v_scale, sinks, out, lse, row_tiles, prefix_lens, q_indptr, page_table, group,
    num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_table, num_pages, PAGE: gl.constexpr, MEMBERS: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr,
    SINKS: gl.constexpr, WITH_LSE: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
    WIDEN: gl.constexpr, OVERLAP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `kernels.extend.attend_ragged`; k_source and v_source are descriptors ``[pages, P, heads, dim]``."""
    BLOCK_M: gl.constexpr = 64 * MEMBERS
    # More would leave too few registers to a group that folds rows of 256.
    WIDENERS: gl.constexpr = 8 if BLOCK_D < 256 else 4
    q_ring = make_rows(q.dtype.element_ty, MEMBERS, BLOCK_D)
    ring = make_ring(q.dtype.element_ty, MEMBERS, BLOCK_N, BLOCK_D, STAGES)
    # What is fetched: the ring itself, or e4m3 that a further warp group widens into it.
    fetched = ring
    if WIDEN:
        fetched = make_ring(k_source.dtype, 1, BLOCK_N, BLOCK_D, DEPTH)
    agenda = make_agenda(MEMBERS + WIDEN + 1)
    bring = (
        row_tiles, prefix_lens, q_indptr, page_table, k_source, v_source, fetched, ring, agenda, group, num_kv_heads,
        window_left, stride_table, num_pages,
    )  # fmt: skip
    fold = (
        q, k_scale, v_scale, sinks, out, lse, row_tiles, prefix_lens, q_indptr, q_ring, ring, agenda, group,
        num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    # Constants stand in the call: they become values when they are given a name.
    if MEMBERS == 1 and not WIDEN:
        gl.warp_specialize(
            [
                (fold_ragged, (
                    fold, 0, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (bring_ragged, (bring, KEYS, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, VALUES, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
            ],
            [1, 1], [FETCH_REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
    elif MEMBERS == 1:
        gl.warp_specialize(
            [
                (fold_ragged, (
                    fold, 0, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (bring_ragged, (bring, KEYS, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, VALUES, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, WIDENED, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
            ],
            [1, 1, WIDENERS], [FETCH_REGISTERS, FETCH_REGISTERS, WIDEN_REGISTERS],
        )  # fmt: skip
    elif MEMBERS == 3:
        gl.warp_specialize(
            [
                (fold_ragged, (
                    fold, 0, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (fold_ragged, (
                    fold, 1, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (fold_ragged, (
                    fold, 2, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (bring_ragged, (bring, KEYS, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, VALUES, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
            ],
            [4, 4, 1, 1], [REGISTERS, REGISTERS, CROWDED_REGISTERS, CROWDED_REGISTERS],
        )  # fmt: skip
    elif not WIDEN:
        gl.warp_specialize(
            [
                (fold_ragged, (
                    fold, 0, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (fold_ragged, (
                    fold, 1, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (bring_ragged, (bring, KEYS, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, VALUES, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
            ],
            [4, 1, 1], [REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (fold_ragged, (
                    fold, 0, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (fold_ragged, (
                    fold, 1, BLOCK_M, BLOCK_N, BOX, HEAD_DIM, BLOCK_D, WINDOW, CAP, SCALED, SINKS, WITH_LSE, STAGES,
                    OVERLAP,
                )),
                (bring_ragged, (bring, KEYS, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, VALUES, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
                (bring_ragged, (bring, WIDENED, PAGE, BLOCK_M, BLOCK_N, BOX, BLOCK_D, WINDOW, DEPTH, STAGES)),
            ],
            [4, 1, 1, 4], [REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS, WIDEN_REGISTERS],
        )  # fmt: skip
