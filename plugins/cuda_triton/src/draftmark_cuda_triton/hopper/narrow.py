"""Few rows over e4m3 on Hopper: the schedule, partials and merge of `kernels.uniform`; tiles are folded by `turned`.

Bytes: 64 requests x 8192, 8 KV heads of 128: 1.07 GB, 244 µs at 4.4 TB/s. Of shared memory a program with 64 rows takes
16 KiB for q, 8 for weights, and 16 for each of 3 stages of 64 keys: two programs on a multiprocessor. Each KV byte
passes through shared memory twice (in, and to registers), where `fetch.widen_tiles` takes six. All rows of a request
are one row tile (`tiling._narrow`), and so every program has them from the first on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .constants import constants, leavers, moving_of
from .mask import CAUSAL, TREE, reached_by
from .ring import launch_dependents, make_ring
from .roles import start
from .rows import apart, columns_of, inverse_of, nought
from .softmax import sink_mass
from .turned import UNSEEN, RowTile, bring_queries, fold_clear_tiles, fold_narrow_tiles, parts, store_pairs
from .uniform import BLOCK, bring_uniform, clear_rows, rows_of, surplus, tile_range


@gluon.jit
def rows_here(rows, group, inverse, C: gl.constexpr, layout: gl.constexpr):
    """Query row and head of each packed row, and whether the request has it: worked out where it is asked, for numbers
    of rows are cheap, and registers are not.
    """
    row, member = apart(nought() + gl.arange(0, C.BLOCK_M, layout), group, inverse)
    return row, member, row < rows


@gluon.jit
def fold_narrow(given, MEMBER: gl.constexpr, C: gl.constexpr):
    """All packed rows of every request of a piece; see `uniform.fold_uniform`. There is no other MEMBER."""
    (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, own, weights, flags, ring, q_len, tail_len, group, mask_words, window_left, scale, cap,
        stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    ) = given  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_M, 16])
    asked: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows_at: gl.constexpr = gl.SliceLayout(0, scores)
    # Whether tiles within a window have a loop of their own: beside rows of 256 one more would be spilled.
    PARTED: gl.constexpr = C.WINDOW and C.BLOCK_D <= 128
    head, number, num_kv_heads = gl.program_id(1), gl.program_id(2), gl.num_programs(1)
    request = gl.load(work + number * 4)
    tile = gl.load(work + number * 4 + 1)
    left = gl.load(work + number * 4 + 2)
    inverse = inverse_of(group)
    k_factor = 1.0
    v_factor = 1.0
    if C.SCALED & 1:
        k_factor = gl.load(k_scale)
    if C.SCALED & 2:
        v_factor = gl.load(v_scale)
    slot = left * 0
    phase = left * 0
    half = left * 0
    while left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, slots = rows_of(q_indptr, request, q_len, tail_len, C.RAGGED)
        first, end = tile_range(prefix_len, slots, window_left, C)
        after = left - (end + surplus(slots, C) - tile)
        if (tile < end) & (rows > 0):
            asking = nought() + gl.arange(0, C.BLOCK_M, gl.SliceLayout(1, asked))
            stop = gl.minimum(tile + left, end)
            whole = (tile == first) & (stop == end)
            seen_by_all = prefix_len
            if C.TAIL == CAUSAL:
                seen_by_all = prefix_len + slots - rows + 1
            # A tile with room behind the last key is masked whatever its rows see.
            clear = gl.minimum(seen_by_all, prefix_len + slots) // C.BLOCK_N
            if C.TAIL == BLOCK:
                clear = (prefix_len + slots) // C.BLOCK_N
            live = rows * group
            size = bring_queries(
                own, q, begin, asking, asking < live, head, group, inverse, stride_q_row, stride_q_head, C,
                asked,
            )  # fmt: skip
            depths = tail_depth + (begin if C.RAGGED else request * tail_len)
            even = gl.full([C.BLOCK_D // 2, C.BLOCK_M], 0.0, gl.float32, scores)
            odd = gl.full([C.BLOCK_D // 2, C.BLOCK_M], 0.0, gl.float32, scores)
            mass = parts(gl.full([C.BLOCK_N, C.BLOCK_M], 0.0, gl.float32, scores))
            unit = size * (scale * k_factor)
            shown = tile
            if PARTED:
                highest = prefix_len + slots - 1
                if C.TAIL == TREE:
                    row, _, row_live = rows_here(rows, group, inverse, C, rows_at)
                    depth = gl.load(depths + slots - rows + row, mask=row_live, other=0)
                    highest = prefix_len + gl.max(depth, 0)
                # Every row has seen a key before the first tile that is clear.
                shown = gl.minimum(gl.maximum(reached_by(highest, window_left, C), tile), stop)
            elif C.WINDOW:
                clear = tile
            between = gl.minimum(gl.maximum(clear, shown), stop)
            is_shown = shown == tile
            at_first = gl.where(is_shown & (between > tile), 0.0, UNSEEN)
            pivot = gl.full([C.BLOCK_M], 0.0, gl.float32, rows_at) + at_first
            state = (even, odd, pivot, mass)
            row_tile = RowTile(
                group=group, inverse=inverse, begin=begin, rows=rows, prefix_len=prefix_len, tail_len=slots,
                tail_mask=tail_mask, depths=depths, mask_words=mask_words, window_left=window_left,
            )  # fmt: skip
            if PARTED:
                state, slot, phase = fold_narrow_tiles(
                    state, own, weights, flags, ring, slot, phase, tile, shown, row_tile, unit, cap, C, True, scores
                )  # fmt: skip
                even, odd, pivot, mass = state
                # Rows that are none may have seen nothing, and stand somewhere nevertheless.
                _, _, row_live = rows_here(rows, group, inverse, C, rows_at)
                state = (even, odd, gl.where(row_live, pivot, 0.0), mass)
            if C.BLOCK_D > 128 and not C.WINDOW:
                state, slot, phase = fold_narrow_tiles(
                    state, own, weights, flags, ring, slot, phase, tile, between, row_tile, unit, cap, C, False, scores
                )  # fmt: skip
            elif C.BLOCK_D <= 128:
                state, slot, phase = fold_clear_tiles(
                    state, own, weights, flags, ring, slot, phase, shown, between, is_shown, unit, cap, C, scores
                )  # fmt: skip
            state, slot, phase = fold_narrow_tiles(
                state, own, weights, flags, ring, slot, phase, between, stop, row_tile, unit, cap, C, True, scores
            )  # fmt: skip
            even, odd, pivot, mass = state
            row, member, row_live = rows_here(rows, group, inverse, C, rows_at)
            packed = row * group + member
            # A piece in which a row sees nothing weighs nothing: out 0, lse -inf, never 0/0.
            total = gl.convert_layout(gl.sum(gl.sum(mass, 0), 0), rows_at)
            log_mass = gl.where(total > 0, pivot + gl.log2(total), float("-inf"))
            if C.SINKS:
                total += sink_mass(sinks, head * group + member, row_live & whole, pivot)
            share = (v_factor / gl.where(total > 0, total, 1.0))[None, :]
            even = even * share
            odd = odd * share
            if whole:
                moved = nought() + gl.arange(0, C.BLOCK_M, gl.SliceLayout(1, moving_of(C.BLOCK_D)))
                store_pairs(
                    own, even, odd, out, begin, moved, moved < live, head, group, inverse, stride_out_row,
                    stride_out_head, C,
                )  # fmt: skip
                if C.WITH_LSE:
                    cell = (begin + row) * (num_kv_heads * group) + head * group + member
                    gl.store(lse + cell, log_mass * 0.6931471805599453, mask=row_live)
            else:
                block = ((number * 2 + half) * num_kv_heads + head) * C.BLOCK_M + packed
                gl.store(partial_lse + block, log_mass, mask=row_live)
                col = 2 * gl.arange(0, C.BLOCK_D // 2, gl.SliceLayout(1, scores))
                own_col, there = columns_of(packed, col, group, inverse, C, 0)
                cells = partial_out + block.to(gl.int64)[None, :] * C.HEAD_DIM + own_col
                there = there & row_live[None, :]
                gl.store(cells, even, mask=there)
                gl.store(cells + 1, odd, mask=there)
        half = half * 0 + 1
        left = after
        request += 1
        if left > 0:
            _, _, slots = rows_of(q_indptr, request, q_len, tail_len, C.RAGGED)
            tile, end = tile_range(gl.load(prefix_lens + request), slots, window_left, C)


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
def attend_narrow(
    q, k_source, v_source, k_other, v_other, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work,
    prefix_lens, q_indptr, page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words,
    window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, TAIL: gl.constexpr, RAGGED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr, ITEM_COST: gl.constexpr, PDL: gl.constexpr,
    STAGES: gl.constexpr, HEADS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """As `uniform.attend_uniform`, over e4m3 ``[pages, P, heads, dim]``; BLOCK_M: 8 to 64 packed rows a program."""
    C: gl.constexpr = constants(
        PAGE=PAGE, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BOX=BOX, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, STAGES=STAGES,
        DEPTH=STAGES, TAIL=TAIL, RAGGED=RAGGED, WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS, WITH_LSE=WITH_LSE,
        ITEM_COST=ITEM_COST, HEADS=HEADS, STEP=STEP,
    )  # fmt: skip
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D // 2], gl.float16)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], gl.float16)
    own = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, BLOCK_D // 2], rows)
    weights = gl.allocate_shared_memory(gl.float16, [BLOCK_M, BLOCK_N], keys)
    flags = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = make_ring(gl.int16, leavers(C), STAGES, C, HELD=2)
    if PDL:
        # Barriers were made while the grid before this one ran.
        launch_dependents()
    if RAGGED and gl.program_id(0) == 0:
        clear_rows(out, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, C)
    bring = (
        work, prefix_lens, q_indptr, page_table, (k_source, k_other), (v_source, v_other), ring, ring, q_len, tail_len,
        group, window_left, stride_table, num_pages,
    )  # fmt: skip
    fold = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, own, weights, flags, ring, q_len, tail_len, group, mask_words, window_left, scale, cap,
        stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    start(fold_narrow, fold, bring_uniform, bring, C, False, 0)
