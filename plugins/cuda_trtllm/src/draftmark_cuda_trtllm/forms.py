"""Which kernel a mode runs and how its rows lie. Integers only: it also runs on the symbols of a proof.

XQA has two forms. The decode form takes one row a request. The tree form takes rows behind a ragged indptr, and a mask
over the *last* rows of the sequence: a request of n rows has a mask of n x n bits, whose row stride is
``ceil(q_rows / 32)`` words for a compile-time-like number q_rows that also fixes the grid: blocks of 32 (row, head)
pairs for q_rows rows of each KV head.

* **VERIFY, DRAFT_EXTEND**: q_rows = D rows, all real.
* **DRAFT** of topk k > 1 and T > k tail slots: the mask must reach over T slots, so a request is given T rows, of which
  the first k are real and the rest dummies; but q_rows stays k, so no block starts at a dummy and the prefix is read
  for k rows, not for T. With T > 32, q_rows grows until a row of the mask holds T bits.
* **EXTEND** is not XQA's: cuda_triton's kernel runs it, over row tiles.
* An fp8 cache runs the tree form in every mode: for one row a request FlashInfer would pick a Hopper kernel that
  rounds the queries to fp8 too.
"""

from __future__ import annotations

from typing import Any

from draftmark import Geometry, Mode, ceil_div, maximum, minimum

PAGES = (16, 32, 64, 128)
LEAST_TILE_ROWS = 16
"""(row, head) pairs of the smallest row tile that cuda_triton's EXTEND cuts (`heuristics.common.MIN_BLOCK_M` there)."""
SCHEDULE_HEADER_ROWS = 2
"""Rows that it keeps before the first row tile (`heuristics.common.SCHEDULE_HEADER_ROWS` there)."""
BLOCK_ROWS = 32
"""(row, head) pairs that a block of the tree form takes (M_TILESIZE in xqa/defines.h)."""
KV_TILE = 256
"""Keys of one step of a block (ctaTile.x in xqa/mha.cu); a sequence is split into no more parts than it has tiles."""
MASK_BITS = 32
FP8 = "float8_e4m3fn"
GEN_ARCHS = (100, 103)
"""Devices of FlashInfer's trtllm-gen kernels."""
XQA_ARCHS = (90, 120, 121)
SIBLING_MODES = (Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)
"""Modes that XQA has no form for: rows that the device decides, and rows that see later rows."""


def uses_gen(geometry: Geometry) -> bool:
    """Whether trtllm-gen serves this device, and not XQA."""
    return geometry.device.arch in GEN_ARCHS


def is_fp8(geometry: Geometry) -> bool:
    """Whether the cache is quantised."""
    return geometry.attention.kv_dtype == FP8


def q_rows(geometry: Geometry, mode: Mode) -> Any:
    """Rows that the tree form is told of: the grid's, and the mask's row stride in bits, rounded up to 32."""
    draft = geometry.draft
    if mode is Mode.DECODE:
        return 2
    if mode is Mode.DRAFT:
        words = ceil_div(geometry.max_draft_tail, MASK_BITS)
        return maximum(2, draft.topk, MASK_BITS * (words - 1) + 1)
    return maximum(2, draft.num_draft_tokens)


def mask_words(geometry: Geometry, mode: Mode) -> Any:
    """int32 words of one row of the kernel's mask: ``ceil(q_rows / 32)``, in a form that is short to prove with."""
    draft = geometry.draft
    if mode is Mode.DRAFT:
        return maximum(1, ceil_div(geometry.max_draft_tail, MASK_BITS))
    if mode is Mode.DECODE:
        return ceil_div(q_rows(geometry, mode), MASK_BITS)
    return ceil_div(draft.num_draft_tokens, MASK_BITS)


def max_lanes(geometry: Geometry, mode: Mode) -> Any:
    """Rows per request in the kernel's layout, dummies included, of the largest forward of a uniform mode."""
    if mode is Mode.DRAFT:
        return maximum(1, geometry.max_draft_tail)
    return geometry.extent(mode).q_len


def lanes(mode: Mode, q_len: int, tail_len: int) -> int:
    """Rows per request in the kernel's layout, dummies included, of one batch."""
    return tail_len if mode is Mode.DRAFT and q_len > 1 else q_len


def masked_modes(geometry: Geometry) -> list[Mode]:
    """Modes that write a mask and an indptr for the tree form."""
    modes = (Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND, *((Mode.DECODE,) if is_fp8(geometry) else ()))
    return [mode for mode in geometry.modes if mode in modes]


def has_trees(geometry: Geometry) -> Any:
    """1 if some forward takes the tree form, else 0: with one row a request only an fp8 cache does."""
    if is_fp8(geometry):
        return 1
    return maximum(0, *(minimum(1, geometry.extent(mode).q_len - 1) for mode in masked_modes(geometry)))


def stages(geometry: Geometry) -> bool:
    """Whether some draft step has more tail slots than rows, and so dummies."""
    draft = geometry.draft
    return Mode.DRAFT in geometry.modes and draft.topk > 1 and draft.num_steps > 2


def uniform_modes(geometry: Geometry) -> list[Mode]:
    """Modes that XQA runs: all of one extent but whole blocks, whose rows see later ones."""
    return [mode for mode in geometry.modes if mode not in (Mode.EXTEND, *SIBLING_MODES)]


def sibling_modes(geometry: Geometry) -> list[Mode]:
    """Modes of few rows that cuda_triton's kernels run."""
    return [mode for mode in geometry.modes if mode in SIBLING_MODES]


def kernels(geometry: Geometry) -> list[int]:
    """XQA's kernels that a geometry can ask for: 1 for the decode form, else q_rows of the tree form."""
    found = set()
    for mode in uniform_modes(geometry):
        alone = geometry.extent(mode).q_len == 1 and not is_fp8(geometry)
        found.add(1 if alone else q_rows(geometry, mode))
    return sorted(found)


def row_tiles(geometry: Geometry, num_rows: Any, num_reqs: Any) -> Any:
    """Rows of the buffer of row tiles for so many EXTEND rows of so many requests, at most: agenda and tiles."""
    return SCHEDULE_HEADER_ROWS + num_rows * geometry.attention.group_size // LEAST_TILE_ROWS + num_reqs


def blocks(group: int, rows: Any) -> Any:
    """Blocks of the tree form per KV head and request; the decode form has one."""
    return ceil_div(rows * group, BLOCK_ROWS)


def fills_blocks(geometry: Geometry, q_len: int, rows: int) -> bool:
    """Whether the blocks of a request end with its real rows, so that dummies need no memory behind them."""
    return rows == q_len and q_len * geometry.attention.group_size % BLOCK_ROWS == 0
