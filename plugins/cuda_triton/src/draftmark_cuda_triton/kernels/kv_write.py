"""Kernel of write_kv: stores new K and V rows to their slots, and quantizes them if the cache is e4m3.

A program moves K and V of BLOCK_ROWS rows. Example: 64 rows, 8 heads of 128, bf16. 256 KiB read and 256 KiB written
take 0.12 µs at 4.3 TB/s, so the launch dominates.
"""

import triton
import triton.language as tl

from .convert import convert


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["k_scale", "v_scale", "slot_mapping"])
def write_kv_rows(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slot_mapping,
    num_rows,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_kc_page,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_page,
    stride_vc_slot,
    stride_vc_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store k and v ``[num_rows, heads, dim]`` to the cache ``[pages, P, heads, dim]`` at slot_mapping.

    Args:
        slot_mapping: int64 ``[num_rows]``; a row with slot -1 is not stored.
    """
    if PDL:
        # Wait for the preceding grid, then let the attention kernel start. That kernel waits until all rows are stored.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row_live = row < num_rows
    slot = tl.load(slot_mapping + row, mask=row_live, other=0)
    page, offset = (slot // PAGE_SIZE)[:, None], (slot % PAGE_SIZE)[:, None]
    element = tl.arange(0, BLOCK)
    # Slot -1 marks a padding row, or a row for which the engine has no cache slot.
    live = (row_live & (slot >= 0))[:, None] & (element < NUM_HEADS * HEAD_DIM)[None, :]
    head, dim = (element // HEAD_DIM)[None, :], (element % HEAD_DIM)[None, :]

    new_k = tl.load(k + row[:, None] * stride_k_row + head * stride_k_head + dim, mask=live)
    new_v = tl.load(v + row[:, None] * stride_v_row + head * stride_v_head + dim, mask=live)
    if SCALED & 1:
        new_k = new_k.to(tl.float32) / tl.load(k_scale)
    if SCALED & 2:
        new_v = new_v.to(tl.float32) / tl.load(v_scale)
    if QUANTIZE:
        # e4m3 has no infinity: beyond 448 the conversion must saturate, not wrap into NaN.
        new_k = convert(tl.clamp(new_k.to(tl.float32), -448.0, 448.0), k_cache.dtype.element_ty)
        new_v = convert(tl.clamp(new_v.to(tl.float32), -448.0, 448.0), v_cache.dtype.element_ty)
    k_target = k_cache + page * stride_kc_page + offset * stride_kc_slot + head * stride_kc_head + dim
    v_target = v_cache + page * stride_vc_page + offset * stride_vc_slot + head * stride_vc_head + dim
    tl.store(k_target, new_k, mask=live)
    tl.store(v_target, new_v, mask=live)
