"""Plans of FlashInfer's MLA kernels: passes, work items, buffers and bytes. Integers only, no torch.

The formulas follow `MLAPlan` of `attention/scheduler.cuh`, FlashInfer 0.7.2. A packed row is a pair (query row, head).
A cluster of one or two CTAs processes one tile of packed rows against one chunk of keys; that is a work item. The
arrays of work items have a fixed length that the library does not check (flashinfer#5170).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftmark import BufferSpec, Geometry, Memory, Mode, Role, Unit, ceil_div, maximum, minimum

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
SOURCE = "MLAPlan of FlashInfer 0.7.2, attention/scheduler.cuh"


def is_pair(packed: Any) -> Any:
    """Return 1 if a mean of `packed` rows of a request makes clusters of two CTAs, else 0; also of symbols."""
    return minimum(1, maximum(0, packed - CTA_ROWS))


def tile_rows(packed: Any) -> Any:
    """Return the packed rows of a cluster's tile for a mean of `packed` rows of a request."""
    return CTA_ROWS + CTA_ROWS * is_pair(packed)


def splits_a_row(heads: int, q_len: int) -> bool:
    """Return true if a tile may end between two heads of one of q_len rows.

    FlashInfer's causal kernels then omit that row's last key at some lengths, because the kernel rounds the tile's last
    row down and the plan rounds it up. FlashInfer's own wrapper refuses such batches.
    """
    tile = tile_rows(heads * q_len)
    return q_len > 1 and heads * q_len > tile and tile % heads != 0


def ragged_splits_a_row(heads: int) -> bool:
    """Return true if a tile of some EXTEND batch may end between two heads of a row; see `splits_a_row`."""
    return 2 * CTA_ROWS % heads != 0


def may_run_two_passes(geometry: Geometry, mode: Mode) -> bool:
    """Return true if some forward of `mode` runs an unmasked pass over the prefix and a second one over the tail."""
    draft, heads = geometry.draft, geometry.attention.num_qo_heads
    if mode is Mode.EXTEND:
        return ragged_splits_a_row(heads)
    if mode is Mode.VERIFY:
        return bool(draft.num_draft_tokens > 1)
    if mode is Mode.DRAFT:
        return bool(draft.topk > 1)
    return mode is Mode.DRAFT_EXTEND and splits_a_row(heads, geometry.extent(mode).q_len)


def max_works(geometry: Geometry, mode: Mode) -> Any:
    """Return an upper bound of the work items of a forward of `mode`.

    Each tile has at least one chunk of keys, and all tiles together have at most one more for each cluster. An EXTEND
    batch has small tiles up to a mean of 64 packed rows of a request, and large ones above it.
    """
    heads, reqs, clusters = geometry.attention.num_qo_heads, geometry.max_reqs, geometry.device.num_sms
    if mode is Mode.EXTEND:
        packed = geometry.limits.max_extend_tokens * heads
        small = (CTA_ROWS + 1) * reqs // CTA_ROWS + reqs
        return maximum(small, packed // (2 * CTA_ROWS) + reqs) + clusters
    packed = geometry.extent(mode).q_len * heads
    return reqs * ceil_div(packed, tile_rows(packed)) + clusters


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
        BufferSpec(SLOTS, Role.SLOT_MAPPING, slots, "int64", Unit.TOKENS, "max_rows"),
        BufferSpec(INTS, Role.WORKSPACE, (maximum(*ends),), "uint8", Unit.BYTES, SOURCE),
        BufferSpec(FLOATS, Role.WORKSPACE, (floats,), "uint8", Unit.BYTES, SOURCE),
        BufferSpec(SCRATCH, Role.HOST_STAGING, (plan,), "uint8", Unit.BYTES, SOURCE, memory=Memory.PINNED),
    ]
    rows = [geometry.max_rows(mode) for mode in geometry.modes if may_run_two_passes(geometry, mode)]
    if rows:
        shape = (maximum(*rows), a.num_qo_heads)
        specs.append(BufferSpec(LSE, Role.PARTIAL_LSE, shape, "float32", Unit.ROWS, "rows of forwards in two passes"))
    return specs


def _packed(geometry: Geometry) -> list[Any]:
    """Return for each mode the mean packed rows that need the largest float workspace."""
    heads = geometry.attention.num_qo_heads
    return [1 if mode is Mode.EXTEND else geometry.extent(mode).q_len * heads for mode in geometry.modes]


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes that one batch uses of each workspace, by buffer."""
    heads, plan = geometry.attention.num_qo_heads, int_bytes(geometry.device.num_sms)
    live = [n for n in batch.q_lens if n] or [1]
    used = {spec.name: 0 for spec in buffers(geometry) if spec.name != SLOTS}
    used |= {
        INTS: plan_offset(geometry, batch.mode, batch.step) + plan,
        FLOATS: float_bytes(geometry, sum(live) * heads // len(live)),
        SCRATCH: plan,
    }
    if may_run_two_passes(geometry, batch.mode):
        used[LSE] = sum(batch.q_lens) * heads * 4
    return used
