"""Choice of XQA's kernel for a mode, and the layout of rows in that kernel.

The functions take integers, or symbols when a sizing proof calls them.

XQA has two forms. The decode form takes one row per request. The tree form takes a ragged indptr and a mask over the
*last* rows of each sequence. A request of n rows has a mask of n x n bits. A mask row has ``ceil(q_rows / 32)`` int32
words. The argument q_rows also fixes the grid: blocks of 32 (row, head) pairs cover q_rows rows of each KV head.

* **VERIFY, DRAFT_EXTEND**: q_rows is the number of rows of a request, and all of them are real.
* **DRAFT** with topk k > 1 and T > k tail slots (draft tokens so far): a mask row needs T bits, so a request gets T
  rows in the layout. The first k rows are real, all later rows are padding. q_rows stays k, so no block starts at a
  padding row, and the kernel reads the prefix for k rows, not for T. With T > 32, q_rows grows until a mask row holds
  T bits.
* **EXTEND**: cuda_triton's prefill kernel runs it, over row tiles.
* **fp8 cache**: the tree form runs every mode. For one row per request FlashInfer would choose a Hopper kernel that
  also rounds the queries to fp8.

*Lanes* are the rows of a request in the kernel's layout, padding rows included.
"""

from __future__ import annotations

from typing import Any

from draftmark import Geometry, Mode, ceil_div, maximum, minimum

PAGES = (16, 32, 64, 128)
LEAST_TILE_ROWS = 16
"""(row, head) pairs of the smallest row tile of cuda_triton's EXTEND (`heuristics.common.MIN_BLOCK_M` there)."""
SCHEDULE_HEADER_ROWS = 2
"""Rows of cuda_triton's schedule before the first row tile (`heuristics.common.SCHEDULE_HEADER_ROWS` there)."""
BLOCK_ROWS = 32
"""(row, head) pairs of one block of the tree form (M_TILESIZE in xqa/defines.h)."""
KV_TILE = 256
"""Keys of one step of a block (ctaTile.x in xqa/mha.cu). A sequence has at most one split-KV part per KV tile."""
MASK_BITS = 32
FP8 = "float8_e4m3fn"
GEN_ARCHS = (100, 103)
"""Compute capabilities of FlashInfer's trtllm-gen kernels."""
XQA_ARCHS = (90, 120, 121)
SIBLING_MODES = (Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)
"""Modes that XQA cannot run: the device chooses the rows, or a row sees later rows. cuda_triton runs them."""


def uses_gen(geometry: Geometry) -> bool:
    """Return true if trtllm-gen runs this GPU's attention instead of XQA."""
    return geometry.device.arch in GEN_ARCHS


def is_fp8(geometry: Geometry) -> bool:
    """Return true if the KV cache is e4m3."""
    return geometry.attention.kv_dtype == FP8


def q_rows(geometry: Geometry, mode: Mode) -> Any:
    """Return q_rows, an argument of the tree form (XQA's kernel with a mask).

    Its grid covers q_rows rows of a request, and a mask row has q_rows bits, rounded up to a multiple of 32.
    """
    draft = geometry.draft
    if mode is Mode.DECODE:
        return 2
    if mode is Mode.DRAFT:
        words = ceil_div(geometry.max_draft_tail, MASK_BITS)
        return maximum(2, draft.topk, MASK_BITS * (words - 1) + 1)
    return maximum(2, geometry.extent(mode).q_len)


def mask_words(geometry: Geometry, mode: Mode) -> Any:
    """Return the int32 words of one mask row, which is ``ceil(q_rows / 32)``.

    The expression is a simpler equal one, because sizing proofs then have fewer cases.
    """
    if mode is Mode.DRAFT:
        return maximum(1, ceil_div(geometry.max_draft_tail, MASK_BITS))
    if mode is Mode.DECODE:
        return ceil_div(q_rows(geometry, mode), MASK_BITS)
    return ceil_div(geometry.extent(mode).q_len, MASK_BITS)


def max_lanes(geometry: Geometry, mode: Mode) -> Any:
    """Return the most rows that a request has in XQA's layout, padding included, in any forward of a mode."""
    if mode is Mode.DRAFT:
        return maximum(1, geometry.max_draft_tail)
    return geometry.extent(mode).q_len


def lanes(mode: Mode, q_len: int, tail_len: int) -> int:
    """Return the rows that each request of one batch has in XQA's layout, padding included."""
    return tail_len if mode is Mode.DRAFT and q_len > 1 else q_len


def masked_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that run XQA's tree form (the kernel with a mask), for which a mask is written."""
    modes = (Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND, *((Mode.DECODE,) if is_fp8(geometry) else ()))
    return [mode for mode in geometry.modes if mode in modes]


def has_trees(geometry: Geometry) -> Any:
    """Return 1 if some forward runs the tree form (XQA's kernel with a mask), else 0.

    A forward with one row per request runs it only with an fp8 cache.
    """
    if is_fp8(geometry):
        return 1
    return maximum(0, *(minimum(1, geometry.extent(mode).q_len - 1) for mode in masked_modes(geometry)))


def stages(geometry: Geometry) -> bool:
    """Return true if a draft step sees draft tokens of earlier steps, so that its rows are staged with padding rows."""
    draft = geometry.draft
    return Mode.DRAFT in geometry.modes and draft.topk > 1 and draft.num_steps > 2


def uniform_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that XQA or trtllm-gen runs: all except EXTEND and cuda_triton's modes."""
    return [mode for mode in geometry.modes if mode not in (Mode.EXTEND, *SIBLING_MODES)]


def sibling_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that the sibling plugin cuda_triton runs with its decode and verify kernels."""
    return [mode for mode in geometry.modes if mode in SIBLING_MODES]


def kernels(geometry: Geometry) -> list[int]:
    """Return the XQA kernels that a geometry can launch, each as a number.

    1 is the decode form (no mask); a larger number is q_rows of a tree form (with a mask).
    """
    found = set()
    for mode in uniform_modes(geometry):
        decode_form = geometry.extent(mode).q_len == 1 and not is_fp8(geometry)
        found.add(1 if decode_form else q_rows(geometry, mode))
    return sorted(found)


def row_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Return the rows of cuda_triton's EXTEND schedule: its header, and at most one row for each row tile."""
    return SCHEDULE_HEADER_ROWS + num_rows * geometry.attention.group_size // LEAST_TILE_ROWS + num_reqs


def blocks(group: int, rows: Any) -> Any:
    """Return the CTAs of the tree form (XQA's kernel with a mask) per KV head and request.

    Each has BLOCK_ROWS (row, head) pairs.
    """
    return ceil_div(rows * group, BLOCK_ROWS)


def fills_blocks(geometry: Geometry, q_len: int, rows: int) -> bool:
    """Return true if the kernel's last block ends exactly at a request's last real row, so it reads no padding row."""
    return rows == q_len and q_len * geometry.attention.group_size % BLOCK_ROWS == 0
