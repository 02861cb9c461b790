"""Buffer sizes of the XQA backend, computed from integers, or from symbols in a sizing proof.

XQA checks no bound of its scratch, so the sizes follow `xqa/mha.cu` of FlashInfer 0.7. It splits the keys of a
request into ``max(1, SMs // (requests · KV heads))`` parts. A single part needs no merge and no scratch. Otherwise
all requests and KV heads together have at most SMs parts, and each part stores one record per block of rows.
"""

from __future__ import annotations

from typing import Any

from draftmark import BufferSpec, Geometry, Mode, ceil_div, maximum

from . import forms, gen_sizing

LENS, SLOTS, MASK, INDPTR, PAGES = "kv_lens", "slot_mapping", "tail_mask", "row_indptr", "page_table"
QUERIES, OUTPUTS = "staged_queries", "staged_outputs"
ROW_TILES = "row_tiles"
SCRATCH, SEMAPHORES, Q_SCALE = "scratch", "semaphores", "q_scale"

METADATA = (SLOTS, LENS, PAGES, MASK, INDPTR, QUERIES, OUTPUTS)
"""Buffers with sizes that follow from the batch."""
STATISTICS = 256
"""Bytes of row maxima and row sums of one part and block: two arrays of 32 float32 (SMemWarpRowMax)."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of one geometry, for the modes that it serves."""
    if forms.uses_gen(geometry):
        return gen_sizing.buffers(geometry) + visible_table(geometry)
    specs = [BufferSpec(SLOTS, (geometry.max_rows_any,), "int64", "max_rows")]
    if Mode.EXTEND in geometry.modes:
        specs.append(_row_tiles(geometry))
    specs += _sibling_buffers(geometry)
    if not forms.uniform_modes(geometry):
        return specs
    specs.append(BufferSpec(LENS, (geometry.max_reqs,), "int32", "max_reqs"))
    specs += visible_table(geometry) + _tree_form(geometry)
    if forms.stages(geometry):
        specs += _staging(geometry)
    return specs + workspace(geometry)


def visible_table(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffer for the page table of a layer with a window; none without a window."""
    if geometry.attention.window_left < 0:
        return []
    shape, formula = (geometry.max_reqs, geometry.max_pages_per_req), "max_reqs × max_pages_per_req"
    return [BufferSpec(PAGES, shape, "int32", formula)]


def _sibling_buffers(geometry: Geometry) -> list[BufferSpec]:
    modes = forms.sibling_modes(geometry)
    if not modes:
        return []
    from draftmark_cuda_triton.shared_sizing import decode_verify_buffers

    return decode_verify_buffers(geometry, modes)


def _tree_form(geometry: Geometry) -> list[BufferSpec]:
    masked = forms.masked_modes(geometry)
    if not masked:
        return []
    rows = geometry.max_reqs
    words = maximum(*(rows * forms.max_lanes(geometry, m) * 2 * forms.mask_words(geometry, m) for m in masked))
    formula = "max_reqs · rows per request, padding included · 2 · ceil(q_rows / 32)"
    return [
        BufferSpec(MASK, (words,), "uint16", formula),
        BufferSpec(INDPTR, (rows + 1,), "int32", "max_reqs + 1"),
    ]


def _staging(geometry: Geometry) -> list[BufferSpec]:
    a = geometry.attention
    shape = (geometry.max_reqs * forms.max_lanes(geometry, Mode.DRAFT), a.num_qo_heads, a.head_dim)
    formula = "max_reqs · k · (S - 1) rows: one per tail slot; rows without a query are not written"
    return [
        BufferSpec(QUERIES, shape, a.q_dtype, formula),
        BufferSpec(OUTPUTS, shape, a.q_dtype, formula),
    ]


def _row_tiles(geometry: Geometry) -> BufferSpec:
    count = forms.row_tiles(geometry, geometry.limits.max_extend_tokens, geometry.max_reqs)
    tiles = f"max_extend_tokens · group / {forms.LEAST_TILE_ROWS} + max_reqs, request and tile"
    formula = f"{tiles}; {forms.SCHEDULE_HEADER_ROWS} before them"
    return BufferSpec(ROW_TILES, (count, 2), "int32", formula)


def workspace(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers for XQA's scratch and semaphores.

    Semaphores must be zero before the first launch; each launch leaves them zero.
    """
    a, sms = geometry.attention, geometry.device.num_sms
    each = [forms.blocks(a.group_size, forms.q_rows(geometry, mode)) for mode in forms.masked_modes(geometry)] or [1]
    most = maximum(*each)
    formula = "xqa/mha.cu: parts <= SMs · blocks; per part 2 · 32 float32 and a block's rows of the padded head_dim"
    trees = forms.has_trees(geometry) * scratch(geometry, sms * most, forms.BLOCK_ROWS)
    size = maximum(trees, scratch(geometry, sms, a.group_size))
    once = "SMs · blocks: one per merge"
    specs = [
        BufferSpec(SCRATCH, (size,), "uint8", formula),
        BufferSpec(SEMAPHORES, (sms * most,), "int32", once, zeros=True),
    ]
    if forms.is_fp8(geometry):
        specs.append(BufferSpec(Q_SCALE, (1,), "float32", "scale · k_scale / v_scale"))
    return specs


def scratch(geometry: Geometry, parts: Any, rows: int) -> Any:
    """Return the bytes of scratch for `parts` split-KV parts of `rows` rows: statistics, then partial outputs.

    The partial outputs start at a multiple of one part's bytes.
    """
    head = 64 if geometry.attention.head_dim <= 64 else 128 if geometry.attention.head_dim <= 128 else 256
    out = rows * head * 2
    return ceil_div(STATISTICS * parts, out) * out + parts * out
