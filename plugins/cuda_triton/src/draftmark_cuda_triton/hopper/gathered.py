"""The kernels of `uniform` and `extend` over pages of any size: keys are gathered, all else is theirs.

Bytes and floor are those of boxes: a key of 128 channels is 256 B that lie together, two lines of DRAM or of L2. What
differs is who asks: per tile of 64 keys 128 threads issue 16 `cp.async` each, where one thread issued 4 boxes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .agenda import make_agenda
from .constants import constants, leavers
from .extend import bring_ragged, fold_ragged
from .gather import GATHER_THREADS
from .mask import CAUSAL
from .ring import launch_dependents, make_ring, make_room
from .roles import start_gathering
from .uniform import bring_uniform, clear_rows, fold_uniform


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
        "stride_k_page",
        "stride_k_slot",
        "stride_k_head",
        "stride_v_page",
        "stride_v_slot",
        "stride_v_head",
    ]
)
def attend_gathered(
    q, k, v, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, page_table,
    tail_mask, tail_depth, q_len, tail_len, num_reqs, num_rows, group, mask_words, window_left, scale, cap,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head, stride_table, stride_k_page, stride_k_slot,
    stride_k_head, stride_v_page, stride_v_slot, stride_v_head, PAGE: gl.constexpr, MEMBERS: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, TAIL: gl.constexpr, RAGGED: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr, WITH_LSE: gl.constexpr,
    ITEM_COST: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, REGISTERS: gl.constexpr,
    HEADS: gl.constexpr, REST: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """As `uniform.attend_uniform`, over ``[pages, P, heads, dim]`` of any P; those strides in bytes."""
    C: gl.constexpr = constants(
        PAGE=PAGE, BLOCK_M=64 * MEMBERS, BLOCK_N=BLOCK_N, BOX=BLOCK_N, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, REST=REST,
        STAGES=STAGES, DEPTH=STAGES, TAIL=TAIL, RAGGED=RAGGED, WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS,
        WITH_LSE=WITH_LSE, ITEM_COST=ITEM_COST, OVERLAP=OVERLAP, MEMBERS=MEMBERS, HEADS=HEADS, STEP=STEP,
        ONE_BY_ONE=True,
    )  # fmt: skip
    q_ring = make_room(q.dtype.element_ty, MEMBERS, 64, C)
    ring = make_ring(q.dtype.element_ty, leavers(C), STAGES, C, GATHER_THREADS)
    k_source = (k, stride_k_page, stride_k_slot, stride_k_head)
    v_source = (v, stride_v_page, stride_v_slot, stride_v_head)
    if PDL:
        # Barriers were made while the grid before this one ran.
        launch_dependents()
    if RAGGED and gl.program_id(0) == 0:
        clear_rows(out, q_indptr, num_reqs, num_rows, group, stride_out_row, stride_out_head, C)
    # No box asks how many pages there are.
    bring = (
        work, prefix_lens, q_indptr, page_table, k_source, v_source, ring, ring, q_len, tail_len, group, window_left,
        stride_table, num_reqs,
    )  # fmt: skip
    fold = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, prefix_lens, q_indptr, tail_mask,
        tail_depth, q_ring, ring, q_len, tail_len, group, mask_words, window_left, scale, cap, stride_q_row,
        stride_q_head, stride_out_row, stride_out_head,
    )  # fmt: skip
    start_gathering(fold_uniform, fold, bring_uniform, bring, C, REGISTERS)


@gluon.jit(
    do_not_specialize=[
        "group",
        "num_kv_heads",
        "window_left",
        "stride_table",
        "stride_k_page",
        "stride_k_slot",
        "stride_k_head",
        "stride_v_page",
        "stride_v_slot",
        "stride_v_head",
        "pieces",
    ]
)
def attend_gathered_ragged(
    q, k, v, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, work, row_tiles, prefix_lens, q_indptr,
    page_table, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
    stride_out_head, stride_table, stride_k_page, stride_k_slot, stride_k_head, stride_v_page, stride_v_slot,
    stride_v_head, pieces, PAGE: gl.constexpr, MEMBERS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr, SINKS: gl.constexpr,
    WITH_LSE: gl.constexpr, CUT: gl.constexpr, ITEM_COST: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, REGISTERS: gl.constexpr, REST: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """As `extend.attend_ragged`, over ``[pages, P, heads, dim]`` of any P; those strides in bytes."""
    C: gl.constexpr = constants(
        PAGE=PAGE, BLOCK_M=64 * MEMBERS, BLOCK_N=BLOCK_N, BOX=BLOCK_N, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, REST=REST,
        STAGES=STAGES, DEPTH=STAGES, TAIL=CAUSAL, RAGGED=True, WINDOW=WINDOW, CAP=CAP, SCALED=SCALED, SINKS=SINKS,
        WITH_LSE=WITH_LSE, ITEM_COST=ITEM_COST, OVERLAP=OVERLAP, MEMBERS=MEMBERS, STEP=STEP, ONE_BY_ONE=True, CUT=CUT,
    )  # fmt: skip
    q_ring = make_room(q.dtype.element_ty, MEMBERS, 64, C)
    ring = make_ring(q.dtype.element_ty, leavers(C), STAGES, C, GATHER_THREADS)
    k_source = (k, stride_k_page, stride_k_slot, stride_k_head)
    v_source = (v, stride_v_page, stride_v_slot, stride_v_head)
    agenda = make_agenda(MEMBERS, C)
    if PDL:
        launch_dependents()
    # No box asks how many pages there are.
    bring = (
        work, row_tiles, prefix_lens, q_indptr, page_table, k_source, v_source, ring, ring, agenda, group, num_kv_heads,
        pieces, window_left, stride_table, 0,
    )  # fmt: skip
    fold = (
        q, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, row_tiles, prefix_lens, q_indptr, q_ring, ring,
        agenda, group, num_kv_heads, window_left, scale, cap, stride_q_row, stride_q_head, stride_out_row,
        stride_out_head,
    )  # fmt: skip
    start_gathering(fold_ragged, fold, bring_ragged, bring, C, REGISTERS)
