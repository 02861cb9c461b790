"""Decode and verify on Hopper over pages of any size: `decode_verify` with a gathering producer (cp.async, not TMA).

With a head_dim of 128 a key is 256 contiguous bytes, so the kernel reads no more bytes than `decode_verify`. For 64
keys of K and V, each of the 128 producer threads issues 16 `cp.async`. TMA would need at most 4 boxes for pages of 64
tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import make_constants, num_empty_arrivals
from .decode_verify import consume_decode_verify, produce_decode_verify
from .epilogue import zero_padding_rows
from .pipeline import allocate_rows, grid_dependency_sync, make_pipeline
from .producer_gather import GATHER_THREADS
from .warp_specialize import start_gather


@gluon.jit(
    do_not_specialize=[
        "q_len",
        "tail_len",
        "num_reqs",
        "num_rows",
        "group",
        "mask_words",
        "window_left",
        "stride_q_row",
        "stride_q_head",
        "stride_out_row",
        "stride_out_head",
        "stride_table",
        "stride_k_page",
        "stride_k_slot",
        "stride_k_head",
        "stride_v_page",
        "stride_v_slot",
        "stride_v_head",
    ],
    do_not_specialize_on_alignment=[
        "k_scale",
        "v_scale",
        "sinks",
        "lse",
        "work",
        "prefix_lens",
        "q_indptr",
        "page_table",
        "tail_mask",
        "tail_depth",
    ],
)
def attend_decode_verify_gather(
    q, k, v, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, page_table,
    tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words, window_left, scale, cap,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, stride_k_page, stride_k_slot,
    stride_k_head, stride_v_page, stride_v_slot, stride_v_head, PAGE_SIZE: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_KIND: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr,
    OVERHEAD_TILES: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, INTRA_WG_OVERLAP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, KV_HEADS_PER_TILE: gl.constexpr, BLOCK_D_REST: gl.constexpr,
    STRIDE_ALIGN: gl.constexpr,
):  # fmt: skip
    """Attend decode or verify rows over pages of any size.

    Arguments as in `decode_verify.attend_decode_verify`, except these.

    Args:
        k, v: pointers to K and V ``[pages, P, heads, dim]``.
        stride_k_page, …, stride_v_head: their strides in bytes, multiples of 16.
    """
    CFG: gl.constexpr = make_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_M=64 * NUM_CONSUMER_WGS, BLOCK_N=BLOCK_N, BOX_KEYS=BLOCK_N, HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D, BLOCK_D_REST=BLOCK_D_REST, STAGES=STAGES, FP8_STAGES=STAGES, TAIL_KIND=TAIL_KIND,
        WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS, WITH_LSE=WITH_LSE,
        OVERHEAD_TILES=OVERHEAD_TILES, INTRA_WG_OVERLAP=INTRA_WG_OVERLAP, NUM_CONSUMER_WGS=NUM_CONSUMER_WGS,
        KV_HEADS_PER_TILE=KV_HEADS_PER_TILE, STRIDE_ALIGN=STRIDE_ALIGN, GATHER_KV=True,
    )  # fmt: skip
    q_smem = allocate_rows(q.dtype.element_ty, NUM_CONSUMER_WGS, 64, CFG)
    pipeline = make_pipeline(q.dtype.element_ty, num_empty_arrivals(CFG), STAGES, CFG, GATHER_THREADS)
    k_source = (k, stride_k_page, stride_k_slot, stride_k_head)
    v_source = (v, stride_v_page, stride_v_slot, stride_v_head)
    if PDL:
        # Everything above, such as initializing the barriers, overlaps the preceding grid (programmatic dependent
        # launch).
        grid_dependency_sync()
    if (q_len == 0) & (gl.program_id(0) == 0):
        zero_padding_rows(out, lse, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, CFG)
    # The last argument is a placeholder: only the TMA producer reads num_pages.
    producer_args = (
        work, prefix_lens, q_indptr, page_table, k_source, v_source, pipeline, pipeline, q_len, tail_len, group,
        window_left, stride_table, num_reqs,
    )  # fmt: skip
    consumer_args = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_smem, pipeline, q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row,
        stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    start_gather(consume_decode_verify, consumer_args, produce_decode_verify, producer_args, CFG, CONSUMER_REGISTERS)
