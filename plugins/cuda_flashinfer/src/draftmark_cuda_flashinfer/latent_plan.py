"""Plans of FlashInfer's MLA kernels: passes, work items, buffers and bytes. Integers only, no torch.

The formulas follow `MLAPlan` of `attention/scheduler.cuh`, FlashInfer 0.7. A packed row is a pair (query row, head).
A cluster of one or two CTAs processes one tile of packed rows against one chunk of keys; that is a work item. The
arrays of work items have a fixed length that the library does not check (flashinfer#5170).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftmark import BufferSpec, Geometry, Mode, ceil_div, maximum, minimum

from .partition import ALIGNMENT

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

SLOTS, LSE = "slot_mapping", "prefix_lse"
INTS, FLOATS, SCRATCH = "int_workspace", "float_workspace", "plan_scratch"
CTA_ROWS = 64
"""Packed rows of one CTA's tile. A cluster has two CTAs if requests have more than 64 packed rows in the mean."""
MAX_WORKS = 16384
"""Work items that the plan's arrays hold."""
WORK_ARRAYS = 9
MERGE_ARRAYS = 5
"""Arrays with one entry for each SM."""
SOURCE = "MLAPlan of FlashInfer 0.7, attention/scheduler.cuh"


def is_pair(packed: Any) -> Any:
    """Return 1 if a mean of `packed` rows of a request makes clusters of two CTAs, else 0; also of symbols."""
    return minimum(1, maximum(0, packed - CTA_ROWS))


def tile_rows(packed: Any) -> Any:
    """Return the packed rows of a cluster's tile for a mean of `packed` rows of a request."""
    return CTA_ROWS + CTA_ROWS * is_pair(packed)


def splits_rows(heads: Any) -> Any:
    """Return 1 if tiles of 128 packed rows may end between two heads of a row, else 0; also of symbols."""
    tile = 2 * CTA_ROWS
    return minimum(1, tile - heads * (tile // heads))


def splits_a_row(heads: Any, q_len: Any) -> Any:
    """Return 1 if a tile may end between two heads of one of q_len rows, else 0; also of symbols.

    FlashInfer's causal kernels then omit that row's last key at some lengths, because the kernel rounds the tile's last
    row down and the plan rounds it up. FlashInfer's own wrapper refuses such batches. Requests of up to 128 packed rows
    fit one tile.
    """
    return minimum(1, maximum(0, heads * q_len - 2 * CTA_ROWS)) * splits_rows(heads)


def piece_rows(heads: Any) -> Any:
    """Return the rows of a piece, which fits one tile of 64 packed rows if one row does; also of symbols."""
    return maximum(1, CTA_ROWS // heads)


def rows_of_a_piece(heads: int, q_len: int | None) -> int | None:
    """Return the rows of one request in the plan of a causal pass; None if the plan has the batch's own requests.

    If a tile could end between two heads of a row, the plan gets each request in pieces. A piece fits one tile and has
    its own number of keys. It counts as a request, so the pass stays exact and rounds its output once. A request of one
    row has no pieces.

    Args:
        q_len: rows of each request; None for EXTEND, in which requests have any number of rows.
    """
    splits = splits_rows(heads) if q_len is None else splits_a_row(heads, q_len)
    return int(piece_rows(heads)) if splits and q_len != 1 else None


def may_run_two_passes(geometry: Geometry, mode: Mode) -> bool:
    """Return true if some forward of `mode` runs an unmasked pass over the prefix and a second one over the tail."""
    if mode is Mode.VERIFY:
        return bool(geometry.draft.num_draft_tokens > 1)
    return mode is Mode.DRAFT and bool(geometry.draft.topk > 1)


def max_works(geometry: Geometry, mode: Mode) -> Any:
    """Return an upper bound of the work items of a forward of `mode`.

    Each tile has at least one chunk of keys, and all tiles together have at most one more for each cluster. An EXTEND
    batch has small tiles up to a mean of 64 packed rows of a request, and large ones above it. A piece of a request
    (`rows_of_a_piece`) of up to 128 heads is one tile.
    """
    heads, reqs, clusters = geometry.attention.num_qo_heads, geometry.max_reqs, geometry.device.num_sms
    piece, tiles_of_a_piece = piece_rows(heads), ceil_div(heads, 2 * CTA_ROWS)
    if mode is Mode.EXTEND:
        tokens = geometry.limits.max_extend_tokens
        small = (CTA_ROWS + 1) * reqs // CTA_ROWS + reqs
        whole = maximum(small, tokens * heads // (2 * CTA_ROWS) + reqs)
        return whole + splits_rows(heads) * ((tokens // piece + reqs) * tiles_of_a_piece - whole) + clusters
    q_len = geometry.extent(mode).q_len
    whole = ceil_div(q_len * heads, tile_rows(q_len * heads))
    # A draft tree runs a pass without a mask, which has whole requests.
    cut_up = splits_a_row(heads, q_len) * ceil_div(q_len, piece) * tiles_of_a_piece
    return reqs * maximum(whole, cut_up) + clusters


def int_bytes(num_sms: Any) -> Any:
    """Return the bytes of one plan's arrays. They do not depend on the batch."""
    merge = ceil_div(4 * num_sms, ALIGNMENT) * ALIGNMENT
    return WORK_ARRAYS * 4 * MAX_WORKS + MERGE_ARRAYS * merge


def float_bytes(geometry: Geometry, packed: Any) -> Any:
    """Return the bytes of partial outputs (16 bit) and log-sum-exps for a mean of `packed` rows of a request."""
    odd = geometry.device.num_sms - 2 * (geometry.device.num_sms // 2)
    rows = CTA_ROWS * (geometry.device.num_sms - is_pair(packed) * odd)
    return 2 * rows * (2 * geometry.attention.value_width + 4)


def places(geometry: Geometry, mode: Mode) -> Any:
    """Return the number of plans of `mode` that live together: one for each draft step of a chain.

    All steps of a draft round are planned before their kernels run. A prefix pass has the same plan at each step.
    """
    if mode is Mode.DRAFT and not may_run_two_passes(geometry, mode):
        return maximum(1, geometry.num_draft_steps)
    return 1


def plan_offset(geometry: Geometry, mode: Mode, step: Any) -> Any:
    """Return the byte offset of one forward's plan in the integer workspace. DRAFT_EXTEND comes after the draft steps.

    DRAFT_EXTEND is planned before the draft steps and runs after them, so it has its own place.
    """
    if Mode.DRAFT not in geometry.modes or mode not in (Mode.DRAFT, Mode.DRAFT_EXTEND):
        return 0
    count = places(geometry, Mode.DRAFT)
    return int_bytes(geometry.device.num_sms) * (count if mode is Mode.DRAFT_EXTEND else minimum(step, count - 1))


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of one latent geometry. No buffer grows with lengths: the page table is read in place."""
    plan, a = int_bytes(geometry.device.num_sms), geometry.attention
    ends = [plan_offset(geometry, mode, geometry.last_step(mode)) + plan for mode in geometry.modes]
    floats = maximum(*(float_bytes(geometry, packed) for packed in _packed(geometry)))
    slots = (geometry.max_rows_any,)
    specs = [
        BufferSpec(SLOTS, slots, "int64", "max_rows"),
        BufferSpec(INTS, (maximum(*ends),), "uint8", SOURCE),
        BufferSpec(FLOATS, (floats,), "uint8", SOURCE),
        BufferSpec(SCRATCH, (plan,), "uint8", SOURCE, pinned=True),
    ]
    rows = [geometry.max_rows(mode) for mode in geometry.modes if may_run_two_passes(geometry, mode)]
    if rows:
        shape = (maximum(*rows), a.num_qo_heads)
        specs.append(BufferSpec(LSE, shape, "float32", "rows of forwards in two passes"))
    return specs


def _packed(geometry: Geometry) -> list[Any]:
    """Return for each mode the mean packed rows that need the largest float workspace: few, which make no pairs."""
    heads = geometry.attention.num_qo_heads
    return [1 if mode is Mode.EXTEND else mean_packed(heads, geometry.extent(mode).q_len) for mode in geometry.modes]


def mean_packed(heads: Any, q_len: Any) -> Any:
    """Return the packed rows of a request of q_len rows or, if the plan has pieces, of a largest one; also of symbols.

    A piece of up to 64 heads counts as 64 packed rows, which also make no pair.
    """
    packed = heads * q_len
    return packed - splits_a_row(heads, q_len) * (packed - maximum(heads, CTA_ROWS))


def cut(rows: int, piece: int | None) -> list[int]:
    """Return the rows of each piece of a request."""
    return [min(piece, rows - start) for start in range(0, rows, piece)] if piece else [rows]


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes that one batch uses of each workspace, by buffer; of a verify batch the bytes for a chain."""
    heads, plan = geometry.attention.num_qo_heads, int_bytes(geometry.device.num_sms)
    piece = rows_of_a_piece(heads, None if batch.mode is Mode.EXTEND else geometry.extent(batch.mode).q_len)
    live = [n for rows in batch.q_lens for n in cut(rows, piece) if n] or [1]
    used = {spec.name: 0 for spec in buffers(geometry) if spec.name != SLOTS}
    used |= {
        INTS: plan_offset(geometry, batch.mode, batch.step) + plan,
        FLOATS: float_bytes(geometry, sum(live) * heads // len(live)),
        SCRATCH: plan,
    }
    if may_run_two_passes(geometry, batch.mode):
        used[LSE] = sum(batch.q_lens) * heads * 4
    return used
