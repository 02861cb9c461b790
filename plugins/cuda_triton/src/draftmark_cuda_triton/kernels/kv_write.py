"""Kernel of write_kv: stores new K and V rows to their slots, and quantizes them if the cache is e4m3.

A program moves K and V of BLOCK_ROWS rows. Example: 64 rows, 8 heads of 128, bf16. 256 KiB read and 256 KiB written
take 0.12 µs at 4.3 TB/s, so the launch dominates.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import inline


@inline
def elements_of_row(row_live, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return head and element in the head of BLOCK elements of a row, and bool ``[rows, BLOCK]`` where they exist."""
    element = tl.arange(0, BLOCK)[None, :]
    return element // DIM, element % DIM, row_live & (element < NUM_HEADS * DIM)


@inline
def store_rows(target, new, scale, live, SCALED: tl.constexpr, QUANTIZE: tl.constexpr):
    """Store rows to the cache, divided by the scale and quantized to e4m3 if needed."""
    if SCALED:
        new = new.to(tl.float32) / tl.load(scale)
    if QUANTIZE:
        # e4m3 has no infinity: beyond 448 the conversion must saturate, not wrap into NaN.
        new = convert(tl.clamp(new.to(tl.float32), -448.0, 448.0), target.dtype.element_ty)
    tl.store(target, new, mask=live)


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
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    V_FIRST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store k and v ``[num_rows, heads, dim]`` to the cache ``[pages, P, heads, dim]`` at slot_mapping.

    Args:
        slot_mapping: int64 ``[num_rows]``; a row with slot -1 is not stored.
        K_DIM, V_DIM: elements of a head in k_cache and v_cache; V_DIM is 0 if nothing is stored to v_cache.
        V_FIRST: first element of a head of v that is stored. Latent rows are both k and v, in two parts.
    """
    if PDL:
        # Wait for the preceding grid, then let the attention kernel start. That kernel waits until all rows are stored.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row_live = row < num_rows
    slot = tl.load(slot_mapping + row, mask=row_live, other=0)
    page, offset = (slot // PAGE_SIZE)[:, None], (slot % PAGE_SIZE)[:, None]
    # Slot -1 marks a padding row, or a row for which the engine has no cache slot.
    row_live = (row_live & (slot >= 0))[:, None]
    head, dim, live = elements_of_row(row_live, NUM_HEADS, K_DIM, BLOCK_K)
    new_k = tl.load(k + row[:, None] * stride_k_row + head * stride_k_head + dim, mask=live)
    k_target = k_cache + page * stride_kc_page + offset * stride_kc_slot + head * stride_kc_head + dim
    if V_DIM:
        v_head, v_dim, v_live = elements_of_row(row_live, NUM_HEADS, V_DIM, BLOCK_V)
        new_v = tl.load(v + row[:, None] * stride_v_row + v_head * stride_v_head + V_FIRST + v_dim, mask=v_live)
        v_target = v_cache + page * stride_vc_page + offset * stride_vc_slot + v_head * stride_vc_head + v_dim
        store_rows(v_target, new_v, v_scale, v_live, SCALED & 2, QUANTIZE)
    store_rows(k_target, new_k, k_scale, live, SCALED & 1, QUANTIZE)
