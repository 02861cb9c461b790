"""Value warp groups of the latent kernel: each accumulates p · value for half of the value columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .decode_verify import first_rows_of_tile, row_tile_start
from .latent_config import chunk_layout, chunk_width, half_width, num_chunks
from .pack_gqa import reciprocal, split_packed_row
from .pipeline import advance
from .softmax import rescale_if_moved
from .split_kv import kv_tile_range, kv_tile_stop, request_overhead, request_rows


@gluon.jit
def any_moved(factors):
    """Return 1 in each row of a warp if one of its factors is not 1, else 0. `pack=2` passes the rows of a thread."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred moved;
            setp.neu.f32 moved, $2, 0f3F800000;
            setp.neu.or.f32 moved, $3, 0f3F800000, moved;
            vote.sync.any.pred moved, moved, 0xffffffff;
            selp.b32 $0, 1, 0, moved;
            mov.b32 $1, $0;
        }
        """,
        "=r,=r,f,f", [factors], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def store_half(acc, target, rows, row_live, column: gl.constexpr, ALIGN: gl.constexpr, CFG: gl.constexpr):
    """Store a half of the output, or of the partial results, to rows at int64 offsets `rows` of `target`."""
    for chunk in gl.static_range(num_chunks(CFG)):
        col = column + chunk * chunk_width(CFG)
        col += gl.arange(0, chunk_width(CFG), gl.SliceLayout(0, chunk_layout(CFG)))
        # `gl.multiple_of` has no effect on an argument, and without it a store of the output has one element.
        pointers = target + (rows // ALIGN * ALIGN)[:, None] + col[None, :]
        gl.store(pointers, acc[chunk].to(target.dtype.element_ty), mask=row_live[:, None] & (col >= 0)[None, :])


@gluon.jit
def multiply_values(acc, factors, exchange, half, stage, CFG: gl.constexpr):
    """Return the accumulators of a half times each row's factor, plus p · value of a stage."""
    moved = any_moved(factors)
    scaled = ()
    for chunk in gl.static_range(num_chunks(CFG)):
        scaled = scaled + (rescale_if_moved(acc[chunk], factors, moved),)  # type: ignore[assignment]  # noqa: RUF005
    # All accumulators are ready before the first product is issued, because the compiler would otherwise wait between
    # the products.
    new_acc = ()
    for chunk in gl.static_range(num_chunks(CFG)):
        product = warpgroup_mma(exchange.weights, half.tiles[chunk].index(stage), scaled[chunk], is_async=True)
        new_acc = new_acc + (product,)  # type: ignore[assignment]  # noqa: RUF005
    if num_chunks(CFG) == 1:  # noqa: SIM108  Gluon has no conditional expression of tuples
        new_acc = (warpgroup_mma_wait(0, deps=new_acc),)  # type: ignore[assignment]
    else:
        new_acc = warpgroup_mma_wait(0, deps=new_acc)
    return new_acc


@gluon.jit
def accumulate_values(half, exchange, stage, phase, message, first, stop, CFG: gl.constexpr):
    """Accumulate p · value of key tiles [first, stop) and return the normalized half, one tensor for each chunk."""
    rows: gl.constexpr = gl.SliceLayout(1, chunk_layout(CFG))
    acc = ()
    for _ in gl.static_range(num_chunks(CFG)):
        acc = acc + (gl.full([64, chunk_width(CFG)], 0.0, gl.float32, chunk_layout(CFG)),)  # type: ignore[assignment]  # noqa: RUF005
    for _ in range(first, stop):
        mbarrier.wait(exchange.full, message)
        factors = exchange.factors.load(rows)
        mbarrier.wait(half.full.index(stage), phase)
        acc = multiply_values(acc, factors, exchange, half, stage, CFG)
        async_copy.mbarrier_arrive(exchange.empty, increment_count=False)
        async_copy.mbarrier_arrive(half.empty.index(stage), increment_count=False)
        message ^= 1
        stage, phase = advance(stage, phase, CFG.STAGES)
    mbarrier.wait(exchange.full, message)
    factors = exchange.factors.load(rows)
    result = ()
    for chunk in gl.static_range(num_chunks(CFG)):
        result = result + (acc[chunk] * factors[:, None],)  # type: ignore[assignment]  # noqa: RUF005
    async_copy.mbarrier_arrive(exchange.empty, increment_count=False)
    return result, stage, phase, message ^ 1


@gluon.jit
def run_values(args, HALF: gl.constexpr, CFG: gl.constexpr):
    """Accumulate one half of the value columns for every request in this CTA's split, and store it."""
    (
        out, partial_out, work, prefix_lens, q_indptr, pipeline, exchange, q_len, tail_len, group, window_left,
        stride_out_row, stride_out_head,
    ) = args  # fmt: skip
    split = gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    lane = gl.arange(0, 64, gl.SliceLayout(1, chunk_layout(CFG)))
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    stage = tiles_left * 0
    phase = tiles_left * 0
    message = tiles_left * 0
    partial_half = tiles_left * 0
    column: gl.constexpr = HALF * half_width(CFG)
    STRIDE_ALIGN: gl.constexpr = CFG.STRIDE_ALIGN
    VALUE_DIM: gl.constexpr = CFG.VALUE_DIM
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        first, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            head_offset = packed - first_row * group
            last_row_offset, _ = split_packed_row(head_offset + 63, group, inv_group)
            stop = kv_tile_stop(tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG)
            acc, stage, phase, message = accumulate_values(
                pipeline.halves[HALF], exchange, stage, phase, message, tile, stop, CFG
            )
            row, head = split_packed_row(head_offset + lane, group, inv_group)
            row_live = first_row + row < rows
            if (tile == first) & (tile + tiles_left >= end):
                at = (begin + first_row + row).to(gl.int64) * stride_out_row + head * stride_out_head
                store_half(acc, out, at, row_live, column, STRIDE_ALIGN, CFG)
            else:
                cell = (split * 2 + partial_half) * gl.num_programs(0) * CFG.BLOCK_M + packed + lane
                store_half(acc, partial_out, cell.to(gl.int64) * VALUE_DIM, row_live, column, VALUE_DIM, CFG)
        partial_half = partial_half * 0 + 1
        tiles_left -= end + request_overhead(tail_slots, CFG) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)
