"""Decode and verify over latent rows (MLA) on Hopper: a key is a whole row, its value the first elements of the row.

    2 TMA warps     pipeline: STAGES tiles of BLOCK_N rows        softmax warp group            2 value warp groups
    page ids ─► │ rest │ left half │ right half │ … ── full ─►  s = q·rowᵀ, mask, softmax ─► p ─► acc_left  += p·left
                 ◄────────── empty ─────────────────────────────────────────────────────────────  acc_right += p·right

All query heads share the only KV head, so a row tile packs 64 (query row, head) pairs. An accumulator of 64 x 512
float32 exceeds the registers of one warp group, so each value warp group has half of the columns. The softmax warp
group computes the scores of the next tile while the value warp groups multiply p of the current one.

Shared memory of a CTA for rows of 512 + 64 elements: 72 KiB of q, 2 tiles of 72 KiB, and 8 KiB of p. Bytes and floors:
see `kernels.latent`. The products of a tile of 64 rows and 64 keys take 2176 cycles of the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .decode_verify import first_rows_of_tile, row_tile_start
from .gluon_compat import thread_barrier
from .latent_config import UNALIGNED, UNSPECIALIZED, make_latent_constants
from .latent_pipeline import allocate_queries, make_exchange, make_latent_pipeline
from .latent_producer import load_latent_tiles
from .latent_softmax import run_softmax
from .latent_values import run_values
from .pack_gqa import reciprocal, split_packed_row
from .pipeline import grid_dependency_sync
from .split_kv import first_visible_key, kv_tile_range, kv_tile_stop, request_overhead, request_rows
from .warp_specialize import run_partition

PRODUCER_REGISTERS, VALUE_REGISTERS = gl.constexpr(40), gl.constexpr(160)
"""Registers of a TMA thread, and of a thread of a value warp group; a softmax thread gets the remaining 152."""


@gluon.jit
def run_producer(args, HALF: gl.constexpr, CFG: gl.constexpr):
    """Load the key tiles of this CTA's split, request by request: one half of the values, and with HALF 0 the rest."""
    (
        work, prefix_lens, q_indptr, page_table, values, rests, pipeline, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    ) = args  # fmt: skip
    split = gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    state = (tiles_left * 0, tiles_left * 0)
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        _, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        _, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            last_row_offset, _ = split_packed_row(packed - first_row * group + 63, group, inv_group)
            stop = kv_tile_stop(tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG)
            page_row = page_table + request.to(gl.int64) * stride_table
            state = load_latent_tiles(
                values, rests, pipeline, state, page_row, tile, stop, first_visible_key(prefix_len, window_left, CFG),
                prefix_len + tail_slots, num_pages, HALF, CFG,
            )  # fmt: skip
        tiles_left -= end + request_overhead(tail_slots, CFG) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)


@gluon.jit
def zero_padding_rows(
    out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG: gl.constexpr
):  # fmt: skip
    """Store zeros, and -inf in lse, in the padding rows after the last request."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    lane = gl.arange(0, 16, gl.SliceLayout(1, layout))
    col = gl.arange(0, CFG.VALUE_DIM, gl.SliceLayout(0, layout))
    split, num_splits = gl.program_id(2), gl.num_programs(2)
    for packed in range(gl.load(q_indptr + num_reqs) * group + split * 16, num_rows * group, num_splits * 16):
        row = (packed + lane) // group
        head = packed + lane - row * group
        at = row.to(gl.int64) * stride_out_row + head * stride_out_head
        zeros = gl.full([16, CFG.VALUE_DIM], 0.0, out.dtype.element_ty, layout)
        gl.store(out + at[:, None] + col[None, :], zeros, mask=(row < num_rows)[:, None] & (col >= 0)[None, :])
        if CFG.WITH_LSE:
            none = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
            gl.store(lse + row * group + head, none, mask=row < num_rows)


@gluon.jit
def start_latent(
    SOFTMAX: gl.constexpr, softmax_args, VALUES: gl.constexpr, value_args, PRODUCER: gl.constexpr, producer_args,
    CFG: gl.constexpr
):  # fmt: skip
    """Start the partitions of a CTA; the call returns when all partitions have ended."""
    gl.warp_specialize(
        [
            (run_partition, (SOFTMAX, softmax_args, 0, CFG)),
            (run_partition, (VALUES, value_args, 0, CFG)),
            (run_partition, (VALUES, value_args, 1, CFG)),
            (run_partition, (PRODUCER, producer_args, 0, CFG)),
            (run_partition, (PRODUCER, producer_args, 1, CFG)),
        ],
        [4, 4, 1, 1], [VALUE_REGISTERS, VALUE_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def attend_latent(
    q, k_source, v_source, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, page_table,
    tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words, window_left, scale, cap,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages, PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, VALUE_DIM: gl.constexpr, REST_DIM: gl.constexpr,
    TAIL_KIND: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr,
    OVERHEAD_TILES: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, STRIDE_ALIGN: gl.constexpr,
):  # fmt: skip
    """Attend decode or verify rows; arguments as in `kernels.decode_verify.attend_decode_verify`, except these.

    Args:
        q: rows and heads are multiples of 16 bytes apart.
        k_source, v_source: TMA descriptors of the value part and of the rest ``[pages, P, 1, elements]``, with boxes
            ``[1, BOX_KEYS, 1, 128 bytes]``; v_source is None if rows have no rest.
        VALUE_DIM, REST_DIM: elements of both parts; a power of two from 128 to 512, and 0, 32 or 64.
    """
    CFG: gl.constexpr = make_latent_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_N=BLOCK_N, BOX_KEYS=BOX_KEYS, VALUE_DIM=VALUE_DIM, REST_DIM=REST_DIM, STAGES=STAGES,
        TAIL_KIND=TAIL_KIND, WINDOW=WINDOW, CAP=CAP, SINKS=SINKS, WITH_LSE=WITH_LSE, OVERHEAD_TILES=OVERHEAD_TILES,
        STRIDE_ALIGN=STRIDE_ALIGN,
    )  # fmt: skip
    queries = allocate_queries(q.dtype.element_ty, CFG)
    pipeline = make_latent_pipeline(q.dtype.element_ty, CFG)
    exchange = make_exchange(q.dtype.element_ty, CFG)
    fence_async_shared()
    thread_barrier()
    if PDL:
        # Everything above, such as initializing the barriers, overlaps the preceding grid (programmatic dependent
        # launch).
        grid_dependency_sync()
    if (q_len == 0) & (gl.program_id(0) == 0):
        zero_padding_rows(out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG)
    softmax_args = (
        q, sinks, lse, partial_lse, work, prefix_lens, q_indptr, tail_mask, tail_depth, queries, pipeline, exchange,
        q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row, stride_q_head,
    )  # fmt: skip
    value_args = (
        out, partial_out, work, prefix_lens, q_indptr, pipeline, exchange, q_len, tail_len, group, window_left,
        stride_out_row, stride_out_head,
    )  # fmt: skip
    producer_args = (
        work, prefix_lens, q_indptr, page_table, k_source, v_source, pipeline, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    )  # fmt: skip
    start_latent(run_softmax, softmax_args, run_values, value_args, run_producer, producer_args, CFG)
