"""Decode and verify over e4m3 latent rows (MLA) on Hopper: rows are upcast in registers, as wgmma's operand A.

    3 TMA warps     pipeline: STAGES tiles of 64 rows            softmax warp group               2 value warp groups
    page ids ─► │ left half │ right half, rest │ … ── full ─►  Sᵀ = K · Qᵀ, mask, softmax ─► p ─► Oᵀ_left  += Vᵀ · Pᵀ
                 ◄────────── empty ────────────────────────────────────────────────────────────  Oᵀ_right += Vᵀ · Pᵀ

Operands A and B are swapped, as in `mma_fp8_swap_ab`. So no upcast row is written to shared memory, and a product has
16 or 32 packed rows instead of 64, which takes less time.

Shared memory of a CTA for rows of 512 + 64 elements and 16 packed rows: 4 tiles of 36 KiB, 18 KiB of q, and 2 messages
with 2 KiB of p.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .decode_verify import first_rows_of_tile, row_tile_start
from .gluon_compat import reinterpret, thread_barrier, tma_load
from .latent import zero_padding_rows
from .latent_config import UNALIGNED, UNSPECIALIZED
from .latent_producer import load_part, locate_box
from .latent_swap_ab_config import NUM_PARTS, make_latent_swap_ab_constants, part_cells, query_bytes, tile_bytes
from .latent_swap_ab_memory import empty_barrier, full_barrier, make_swap_ab_memory, query_empty, query_full, tile_of
from .latent_swap_ab_softmax import run_softmax
from .latent_swap_ab_values import run_values
from .pack_gqa import reciprocal, split_packed_row
from .pipeline import advance, grid_dependency_sync
from .split_kv import first_visible_key, kv_tile_range, kv_tile_stop, request_overhead, request_rows
from .warp_specialize import run_partition

VALUE_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(144), gl.constexpr(24)
"""Registers of a thread of a value warp group, and of a TMA thread; a softmax thread gets the remaining 200."""


@gluon.jit
def load_tile(values, rests, memory, stage, phase, places, PART: gl.constexpr, CFG: gl.constexpr):
    """Load one part of a key tile into its stage, with the last part the rest too."""
    full = full_barrier(memory, PART, stage, CFG)
    mbarrier.wait(empty_barrier(memory, PART, stage, CFG), phase ^ 1)
    mbarrier.expect(full, tile_bytes(CFG, PART))
    WIDTH: gl.constexpr = 2 * part_cells(CFG)
    load_part(values, tile_of(memory, PART, stage, CFG), full, places, PART * WIDTH, WIDTH, CFG)
    if CFG.REST_DIM > 0 and NUM_PARTS == PART + 1:
        load_part(rests, memory.rests.index(stage), full, places, 0, CFG.REST_DIM, CFG)


@gluon.jit
def load_queries(queries, query_rests, memory, turn, row, CFG: gl.constexpr):
    """Load the packed rows of q from `row` on, when all scores of the previous request are complete."""
    full = query_full(memory, CFG)
    mbarrier.wait(query_empty(memory, CFG), turn ^ 1)
    mbarrier.expect(full, query_bytes(CFG))
    blocks = reinterpret(memory.queries, queries.dtype, [CFG.VALUE_DIM // 64, CFG.BLOCK_M, 64], queries.layout)
    for i in gl.static_range(CFG.VALUE_DIM // 64):
        tma_load(queries, [row, 64 * i], full, blocks.index(i))
    if CFG.REST_DIM > 0:
        blocks = reinterpret(memory.query_rests, query_rests.dtype, [1, CFG.BLOCK_M, CFG.REST_DIM], query_rests.layout)
        tma_load(query_rests, [row, CFG.VALUE_DIM], full, blocks.index(0))


@gluon.jit
def run_producer(args, PART: gl.constexpr, CFG: gl.constexpr):
    """Load one part of the key tiles of this CTA's split, request by request; the part after the last one is q."""
    (
        work, prefix_lens, q_indptr, page_table, values, rests, memory, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    ) = args  # fmt: skip
    split = gl.program_id(2)
    request = gl.load(work + split * 4)
    tile = gl.load(work + split * 4 + 1)
    tiles_left = gl.load(work + split * 4 + 2)
    inv_group, row_tiles = reciprocal(group), first_rows_of_tile(group, CFG)
    stage = tiles_left * 0
    phase = stage
    while tiles_left > 0:
        prefix_len = gl.load(prefix_lens + request)
        begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
        _, end = kv_tile_range(prefix_len, tail_slots, window_left, CFG)
        packed, first_row = row_tile_start(request, row_tiles, CFG)
        if (tile < end) & (packed < rows * group):
            if NUM_PARTS == PART:
                load_queries(values, rests, memory, phase, begin * group + packed, CFG)
                phase ^= 1
            else:
                last_row_offset, _ = split_packed_row(packed - first_row * group + CFG.BLOCK_M - 1, group, inv_group)
                stop = kv_tile_stop(
                    tile, tiles_left, end, prefix_len, tail_slots, rows, first_row + last_row_offset, CFG
                )
                page_row = page_table + request.to(gl.int64) * stride_table
                first_key = first_visible_key(prefix_len, window_left, CFG)
                for key_tile in range(tile, stop):
                    places = ()
                    for b in gl.static_range(CFG.BLOCK_N // CFG.BOX_KEYS):
                        place = locate_box(page_row, key_tile, b, first_key, prefix_len + tail_slots, num_pages, CFG)
                        places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005
                    load_tile(values, rests, memory, stage, phase, places, PART, CFG)
                    stage, phase = advance(stage, phase, CFG.STAGES)
        tiles_left -= end + request_overhead(tail_slots, CFG) - tile
        request += 1
        if tiles_left > 0:
            _, _, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
            tile, _ = kv_tile_range(gl.load(prefix_lens + request), tail_slots, window_left, CFG)


@gluon.jit
def start_swap_ab(
    SOFTMAX: gl.constexpr, softmax_args, VALUES: gl.constexpr, value_args, PRODUCER: gl.constexpr, producer_args,
    query_args, DTYPE: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Start the partitions of a CTA; the call returns when all partitions have ended."""
    gl.warp_specialize(
        [
            (run_partition, (SOFTMAX, softmax_args, DTYPE, CFG)),
            (run_partition, (VALUES, value_args, 0, CFG)),
            (run_partition, (VALUES, value_args, 1, CFG)),
            (run_partition, (PRODUCER, producer_args, 0, CFG)),
            (run_partition, (PRODUCER, producer_args, 1, CFG)),
            (run_partition, (PRODUCER, query_args, 2, CFG)),
        ],
        [4, 4, 1, 1, 1],
        [VALUE_REGISTERS, VALUE_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["k_scale", "v_scale", *UNALIGNED])
def attend_latent_swap_ab(
    out, q, q_rest, k_source, v_source, k_scale, v_scale, sinks, lse, partial_out, partial_lse, work, prefix_lens,
    q_indptr, page_table, tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words, window_left,
    scale, cap, stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, num_pages,
    PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr,
    VALUE_DIM: gl.constexpr, REST_DIM: gl.constexpr, TAIL_KIND: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    SINKS: gl.constexpr, WITH_LSE: gl.constexpr, OVERHEAD_TILES: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    STRIDE_ALIGN: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Attend decode or verify rows; arguments as in `kernels.decode_verify.attend_decode_verify`, except these.

    Args:
        q, q_rest: TMA descriptors of both parts of the rows of q, ``[rows · heads, elements]``, in boxes of BLOCK_M
            rows and up to 64 elements; q_rest is None if rows have no rest.
        k_source, v_source: TMA descriptors of the value part and of the rest ``[pages, P, 1, elements]`` in e4m3, with
            boxes of BOX_KEYS tokens and up to 128 bytes; v_source is None if rows have no rest.
        BLOCK_M: packed rows of a CTA: 16 or 32.
        VALUE_DIM, REST_DIM: elements of both parts; 512, and 0, 32 or 64.
    """
    CFG: gl.constexpr = make_latent_swap_ab_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BOX_KEYS=BOX_KEYS, VALUE_DIM=VALUE_DIM,
        REST_DIM=REST_DIM, STAGES=STAGES, TAIL_KIND=TAIL_KIND, WINDOW=WINDOW, CAP=CAP, SINKS=SINKS, WITH_LSE=WITH_LSE,
        OVERHEAD_TILES=OVERHEAD_TILES, STRIDE_ALIGN=STRIDE_ALIGN, SCALED=SCALED,
    )  # fmt: skip
    memory = make_swap_ab_memory(CFG)
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
        work, prefix_lens, q_indptr, page_table, k_source, v_source, memory, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    )  # fmt: skip
    query_args = (
        work, prefix_lens, q_indptr, page_table, q, q_rest, memory, q_len, tail_len, group, window_left,
        stride_table, num_pages,
    )  # fmt: skip
    start_swap_ab(
        run_softmax, softmax_args, run_values, value_args, run_producer, producer_args, query_args, q.dtype, CFG
    )
