"""Decode and verify over latent rows (MLA) on Hopper with q in registers: many rows, narrow values, and e4m3 rows.

    3 TMA warps     pipeline: STAGES tiles of 64 rows             softmax warp group            2 value warp groups
    page ids ─► │ left half │ right half │ … , rest ── full ─►  s = q·rowᵀ, mask, softmax ─► p ─► acc_left  += p·left
                 ◄────────── empty ─────────────────────────────────────────────────────────────  acc_right += p·right

The warp groups are those of `latent`. The softmax warp group keeps 432 of 512 value columns of q in registers. This
leaves room for three tiles in flight and halves the bytes that the scores read from shared memory, but each request
takes a little longer to begin. With two tiles, each load waits for the product that reads the same stage.

e4m3 rows: the value warp groups upcast them (`latent_rs_upcast`), exactly and once for all heads and query rows. p is
not rounded below q's dtype.

Rows with values of 256 elements leave registers for tiles of 128 keys, for which softmax and messages take less of the
time, and for p in the value warp groups.

Shared memory of a CTA for rows of 512 + 64 elements: 3 tiles of 64 KiB, one rest of 8 KiB, 18 KiB of q, and 8 KiB of p.
With e4m3 rows: 2 tiles, 2 rests, 6 chunks of 8 KiB and 2 rests of 4 KiB in e4m3, 18 KiB of q, and 8 KiB of p.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .decode_verify import first_rows_of_tile, row_tile_start
from .gluon_compat import thread_barrier
from .latent import zero_padding_rows
from .latent_config import UNALIGNED, UNSPECIALIZED
from .latent_rs_config import make_latent_rs_constants
from .latent_rs_memory import make_latent_memory
from .latent_rs_producer import load_latent_tiles, load_queries
from .latent_rs_softmax import run_softmax
from .latent_rs_values import run_values
from .pack_gqa import reciprocal, split_packed_row
from .pipeline import grid_dependency_sync
from .split_kv import first_visible_key, kv_tile_range, kv_tile_stop, request_overhead, request_rows
from .warp_specialize import run_partition

PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers of a TMA thread."""


@gluon.constexpr_function
def value_registers(CFG):
    """Return the registers of a thread of a value warp group; a softmax thread gets the remaining 168 or 232."""
    return 160 if CFG.VALUE_DIM > 256 else 128


@gluon.jit
def run_producer(args, PART: gl.constexpr, CFG: gl.constexpr):
    """Load one part of q and of the key tiles of this CTA's split, request by request (`load_queries`)."""
    (
        work, prefix_lens, q_indptr, page_table, queries, source, memory, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    ) = args  # fmt: skip
    split = gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    zero = tiles_left * 0
    state = (zero, zero, zero)
    turn = zero
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        _, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            last_row_offset, _ = split_packed_row(packed - first_row * group + 63, group, inv_group)
            stop = kv_tile_stop(tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG)
            stage, phase, number = state
            stage, phase = load_queries(queries, memory, stage, phase, turn, begin * group + packed, PART, CFG)
            turn ^= 1
            state = load_latent_tiles(
                source, memory, (stage, phase, number), page_table + request.to(gl.int64) * stride_table, tile, stop,
                first_visible_key(prefix_len, window_left, CFG), prefix_len + tail_slots, num_pages, PART, CFG,
            )  # fmt: skip
        tiles_left -= end + request_overhead(tail_slots, CFG) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)


@gluon.jit
def start_latent(
    SOFTMAX: gl.constexpr, softmax_args, VALUES: gl.constexpr, value_args, PRODUCER: gl.constexpr, producer_args,
    rest_args, CFG: gl.constexpr
):  # fmt: skip
    """Start the partitions of a CTA; the call returns when all partitions have ended."""
    if CFG.REST_DIM > 0:
        gl.warp_specialize(
            [
                (run_partition, (SOFTMAX, softmax_args, 0, CFG)),
                (run_partition, (VALUES, value_args, 0, CFG)),
                (run_partition, (VALUES, value_args, 1, CFG)),
                (run_partition, (PRODUCER, producer_args, 0, CFG)),
                (run_partition, (PRODUCER, producer_args, 1, CFG)),
                (run_partition, (PRODUCER, rest_args, 2, CFG)),
            ],
            [4, 4, 1, 1, 1],
            [value_registers(CFG), value_registers(CFG), PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (run_partition, (SOFTMAX, softmax_args, 0, CFG)),
                (run_partition, (VALUES, value_args, 0, CFG)),
                (run_partition, (VALUES, value_args, 1, CFG)),
                (run_partition, (PRODUCER, producer_args, 0, CFG)),
                (run_partition, (PRODUCER, producer_args, 1, CFG)),
            ],
            [4, 4, 1, 1], [value_registers(CFG), value_registers(CFG), PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["k_scale", "v_scale", *UNALIGNED])
def attend_latent_rs(
    out, q, q_rest, k_source, v_source, k_scale, v_scale, sinks, lse, partial_out, partial_lse, work, prefix_lens,
    q_indptr, page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words, window_left,
    scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, VALUE_DIM: gl.constexpr,
    REST_DIM: gl.constexpr, TAIL_KIND: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr,
    WITH_LSE: gl.constexpr, OVERHEAD_TILES: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    STRIDE_ALIGN: gl.constexpr, REST_STAGES: gl.constexpr, RAW_CHUNKS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Attend decode or verify rows; arguments as in `kernels.decode_verify.attend_decode_verify`, except these.

    Args:
        q, q_rest: TMA descriptors of both parts of the rows of q, ``[rows · heads, elements]``, in boxes of 64 rows and
            128 bytes; q_rest is None if rows have no rest.
        k_source, v_source: TMA descriptors of the value part and of the rest ``[pages, P, 1, elements]``, with boxes
            ``[1, BOX_KEYS, 1, 64 elements]``; v_source is None if rows have no rest.
        RAW_CHUNKS: halves of e4m3 tiles in flight; 0 for rows in q's dtype.
        VALUE_DIM, REST_DIM: elements of both parts; a power of two from 128 to 512, and 0, 32 or 64.
    """
    CFG: gl.constexpr = make_latent_rs_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_N=BLOCK_N, BOX_KEYS=BOX_KEYS, VALUE_DIM=VALUE_DIM, REST_DIM=REST_DIM, STAGES=STAGES,
        TAIL_KIND=TAIL_KIND, WINDOW=WINDOW, CAP=CAP, SINKS=SINKS, WITH_LSE=WITH_LSE, OVERHEAD_TILES=OVERHEAD_TILES,
        STRIDE_ALIGN=STRIDE_ALIGN, REST_STAGES=REST_STAGES, RAW_CHUNKS=RAW_CHUNKS, SCALED=SCALED,
    )  # fmt: skip
    memory = make_latent_memory(q.dtype, CFG)
    fence_async_shared()
    thread_barrier()
    if PDL:
        # Everything above, such as initializing the barriers, overlaps the preceding grid (programmatic dependent
        # launch).
        grid_dependency_sync()
    if (q_len == 0) & (gl.program_id(0) == 0):
        zero_padding_rows(out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG)
    softmax_args = (
        k_scale, v_scale, sinks, lse, partial_lse, work, prefix_lens, q_indptr, tail_mask, tail_depth, memory, q_len,
        tail_len, group, mask_words, window_left, scale, cap, stride_out_row, stride_out_head,
    )  # fmt: skip
    value_args = (out, partial_out, memory)
    producer_args = (
        work, prefix_lens, q_indptr, page_table, q, k_source, memory, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    )  # fmt: skip
    rest_args = (
        work, prefix_lens, q_indptr, page_table, q_rest, v_source, memory, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    )  # fmt: skip
    start_latent(run_softmax, softmax_args, run_values, value_args, run_producer, producer_args, rest_args, CFG)
