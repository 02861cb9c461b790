"""Prefill on Hopper over pages of any size: `prefill` with a gathering producer (cp.async instead of TMA)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import make_constants, num_empty_arrivals
from .mask import CAUSAL
from .pipeline import allocate_rows, grid_dependency_sync, make_pipeline
from .prefill import consume_prefill, produce_prefill
from .producer_gather import GATHER_THREADS
from .tile_scheduler import make_tile_scheduler
from .warp_specialize import start_gather


@gluon.jit(
    do_not_specialize=[
        "group",
        "num_kv_heads",
        "window_left",
        "stride_q_row",
        "stride_q_head",
        "stride_out_row",
        "stride_out_head",
        "stride_lse_row",
        "stride_table",
        "stride_k_page",
        "stride_k_slot",
        "stride_k_head",
        "stride_v_page",
        "stride_v_slot",
        "stride_v_head",
        "num_splits",
    ],
    do_not_specialize_on_alignment=[
        "k_scale",
        "v_scale",
        "sinks",
        "lse",
        "work",
        "row_tiles",
        "prefix_lens",
        "q_indptr",
        "page_table",
    ],
)
def attend_prefill_gather(
    q, k, v, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, row_tiles, prefix_lens, q_indptr,
    page_table, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
    stride_out_head, stride_lse_row, stride_table, stride_k_page, stride_k_slot, stride_k_head, stride_v_page,
    stride_v_slot, stride_v_head, num_splits, PAGE_SIZE: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr, SPLIT_KV: gl.constexpr,
    OVERHEAD_TILES: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, INTRA_WG_OVERLAP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, BLOCK_D_REST: gl.constexpr, STRIDE_ALIGN: gl.constexpr,
):  # fmt: skip
    """Attend prefill rows over pages of any size.

    Arguments as in `prefill.attend_prefill`, except these.

    Args:
        k, v: pointers to K and V ``[pages, P, heads, dim]``.
        stride_k_page, …, stride_v_head: their strides in bytes, multiples of 16.
    """
    CFG: gl.constexpr = make_constants(
        PAGE_SIZE=PAGE_SIZE, BLOCK_M=64 * NUM_CONSUMER_WGS, BLOCK_N=BLOCK_N, BOX_KEYS=BLOCK_N, HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D, BLOCK_D_REST=BLOCK_D_REST, STAGES=STAGES, FP8_STAGES=STAGES, TAIL_KIND=CAUSAL,
        WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS, WITH_LSE=WITH_LSE, OVERHEAD_TILES=OVERHEAD_TILES,
        INTRA_WG_OVERLAP=INTRA_WG_OVERLAP, NUM_CONSUMER_WGS=NUM_CONSUMER_WGS, STRIDE_ALIGN=STRIDE_ALIGN, GATHER_KV=True,
        SPLIT_KV=SPLIT_KV,
    )  # fmt: skip
    q_smem = allocate_rows(q.dtype.element_ty, NUM_CONSUMER_WGS, 64, CFG)
    pipeline = make_pipeline(q.dtype.element_ty, num_empty_arrivals(CFG), STAGES, CFG, GATHER_THREADS)
    k_source = (k, stride_k_page, stride_k_slot, stride_k_head)
    v_source = (v, stride_v_page, stride_v_slot, stride_v_head)
    scheduler = make_tile_scheduler(NUM_CONSUMER_WGS, CFG)
    if PDL:
        grid_dependency_sync()
    # 0 is a placeholder for num_pages, which only the TMA producer reads.
    producer_args = (
        work, row_tiles, prefix_lens, q_indptr, page_table, k_source, v_source, pipeline, pipeline, scheduler, group,
        num_kv_heads, num_splits, window_left, stride_table, 0,
    )  # fmt: skip
    consumer_args = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, row_tiles, prefix_lens, q_indptr, q_smem,
        pipeline, scheduler, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
        stride_out_head, stride_lse_row,
    )  # fmt: skip
    start_gather(consume_prefill, consumer_args, produce_prefill, producer_args, CFG, CONSUMER_REGISTERS)
