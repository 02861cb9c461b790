"""Buffer sizes of the backend, computed from integers, or from symbols in a sizing proof.

Lengths, page table, tree mask, depths and row offsets are read from the batch and not copied. The buffers are
FlashInfer's flat page ids, the masked pass's tokens and mask bits, workspaces for all plans of a draft round, and
pinned staging for plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftmark import BufferSpec, Geometry, Mode, ceil_div, maximum, minimum

from . import latent_plan, levels, partition

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

SLOTS, INDPTR, PAGES, LAST_PAGE = "slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len"
TAIL_INDPTR, TAIL_SLOTS, TAIL_LAST_PAGE = "tail_indptr", "tail_slots", "tail_last_page_len"
MASK, MASK_INDPTR = "tail_mask", "mask_indptr"
FLOATS, INTS, TAIL_INTS = "float_workspace", "int_workspace", "tail_int_workspace"
STAGING, HOST_INDPTR = "plan_staging", "plan_indptr"
TAIL_OUT, LSE, TAIL_LSE = "tail_out", "lse", "tail_lse"
SOURCE = "PrefillPlan of FlashInfer 0.7, attention/scheduler.cuh"
METADATA = (SLOTS, INDPTR, PAGES, LAST_PAGE, TAIL_INDPTR, TAIL_SLOTS, TAIL_LAST_PAGE, MASK, MASK_INDPTR)
"""Buffers with sizes that follow from the batch."""
HOST_INDPTRS = 2
"""Host arrays that FlashInfer reads while it plans: row offsets of a ragged batch, and page offsets."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of one geometry, for the modes that it serves."""
    if geometry.attention.latent:
        return latent_plan.buffers(geometry)
    reqs = geometry.max_reqs
    specs = [
        BufferSpec(SLOTS, (geometry.max_rows_any,), "int64", "max_rows"),
        BufferSpec(INDPTR, (reqs + 1,), "int32", "max_reqs + 1"),
        BufferSpec(
            PAGES, (reqs * geometry.max_pages_per_req,), "int32", "max_reqs · max_pages_per_req",
        ),
        BufferSpec(LAST_PAGE, (reqs,), "int32", "max_reqs"),
    ]  # fmt: skip
    return [*specs, *_masked_level(geometry), *_plans(geometry)]


def _masked_level(geometry: Geometry) -> list[BufferSpec]:
    a, reqs = geometry.attention, geometry.max_reqs
    extents = [geometry.extent(m, geometry.last_step(m)) for m in levels.masked_modes(geometry)]
    if not extents:
        return []
    tokens = maximum(*(levels.masked_len(geometry, one.tail_len) for one in extents))
    bits = maximum(*(levels.mask_bytes(one.q_len, levels.masked_len(geometry, one.tail_len)) for one in extents))
    rows = reqs * maximum(*(one.q_len for one in extents))
    out = (rows, a.num_qo_heads, a.head_dim)
    return [
        BufferSpec(TAIL_INDPTR, (reqs + 1,), "int32", "max_reqs + 1"),
        BufferSpec(TAIL_SLOTS, (reqs * tokens,), "int32", "max_reqs · masked tokens"),
        BufferSpec(TAIL_LAST_PAGE, (reqs,), "int32", "max_reqs, one-token pages"),
        BufferSpec(MASK, (reqs * bits,), "uint8", "max_reqs · ceil(q · masked tokens / 8)"),
        BufferSpec(MASK_INDPTR, (reqs + 1,), "int32", "max_reqs + 1"),
        BufferSpec(TAIL_OUT, out, a.q_dtype, "rows of the masked level"),
        BufferSpec(LSE, out[:2], "float32", "rows of the masked level"),
        BufferSpec(TAIL_LSE, out[:2], "float32", "rows of the masked level"),
    ]


def _plans(geometry: Geometry) -> list[BufferSpec]:
    ints, tail_ints = plan_bytes(geometry)
    floats = float_workspace(geometry)
    specs = [BufferSpec(INTS, (int_workspace(geometry),), "uint8", SOURCE)]
    if has_floats(geometry):
        specs.append(BufferSpec(FLOATS, (floats,), "uint8", SOURCE))
    if levels.masked_modes(geometry):
        specs.append(BufferSpec(TAIL_INTS, (tail_ints,), "uint8", SOURCE))
    staged = (staging_slots(geometry), aligned(ints) + aligned(tail_ints))
    indptr = (HOST_INDPTRS, geometry.max_reqs + 1)
    return [
        *specs,
        BufferSpec(STAGING, staged, "uint8", "two rounds of plans", pinned=True),
        BufferSpec(HOST_INDPTR, indptr, "int32", "2 · (max_reqs + 1)", pinned=True),
    ]


def staging_slots(geometry: Geometry) -> Any:
    """Return the number of staging slots: one for each plan that can be in flight, which is two rounds of plans."""
    if Mode.DRAFT in geometry.modes:
        return 2 * maximum(1, geometry.num_draft_steps)
    return 2


def plan_bytes(geometry: Geometry) -> tuple[Any, Any]:
    """Return the bytes of the largest plan for the pass over pages, and for the masked pass (0 if there is none)."""
    a, reqs = geometry.attention, geometry.max_reqs
    main, tail = [0], [0]
    for mode in _uniform(geometry):
        split, unsplit = _uniform_plans(geometry, mode)
        main += [split, unsplit]
        if levels.is_masked(geometry, mode):
            tail.append(unsplit)
    if Mode.EXTEND in geometry.modes:
        rows = geometry.limits.max_extend_tokens
        for tiles in partition.extend_tiles(a, rows, reqs):
            main.append(partition.int_bytes(tiles, reqs, rows, graph=False, split=False))
    return maximum(*main), maximum(*tail)


def _uniform_plans(geometry: Geometry, mode: Mode) -> tuple[Any, Any]:
    """Return the bytes of a mode's largest plan with split-KV (0 if no plan splits), and without split-KV."""
    a, reqs, q_len = geometry.attention, geometry.max_reqs, geometry.extent(mode).q_len
    tiles, cut = reqs * partition.uniform_tiles(a, q_len), _max_split_reqs(geometry, q_len)
    limit = partition.max_split_ctas(a, geometry.device)
    split = partition.int_bytes(limit, cut, cut * q_len, graph=True, split=True)
    return minimum(1, cut) * split, partition.int_bytes(tiles, reqs, reqs * q_len, graph=False, split=False)


def int_workspace(geometry: Geometry) -> Any:
    """Return the bytes of the integer workspace for the pass over pages, with a place for each plan of one round.

    Each plan needs its own place, because a draft model plans all draft steps, and also DRAFT_EXTEND, before any of
    their kernels run.
    """
    main, _ = plan_bytes(geometry)
    ends = [
        plan_offset(geometry, mode, geometry.last_step(mode)) + maximum(*_uniform_plans(geometry, mode))
        for mode in (Mode.DRAFT, Mode.DRAFT_EXTEND) if mode in geometry.modes
    ]  # fmt: skip
    return maximum(main, *ends)


def plan_offset(geometry: Geometry, mode: Mode, step: Any) -> Any:
    """Return the byte offset of one forward's plan in the integer workspace."""
    if Mode.DRAFT not in geometry.modes or mode not in (Mode.DRAFT, Mode.DRAFT_EXTEND):
        return 0
    stride = aligned(maximum(*_uniform_plans(geometry, Mode.DRAFT)))
    places = 1 if levels.draft_steps_share_a_plan(geometry) else maximum(1, geometry.num_draft_steps)
    if mode is Mode.DRAFT_EXTEND:
        return places * stride
    return 0 if levels.draft_steps_share_a_plan(geometry) else step * stride


def has_floats(geometry: Geometry) -> bool:
    """Return true if the geometry has a float workspace. A geometry with only the mode EXTEND has none."""
    return bool(_uniform(geometry))


def float_workspace(geometry: Geometry) -> Any:
    """Return bytes of the float workspace. Only small batches split keys, so it does not grow with requests."""
    a = geometry.attention
    limit = partition.max_split_ctas(a, geometry.device)
    found: list[Any] = [0]
    for mode in _uniform(geometry):
        q_len = geometry.extent(mode).q_len
        tile = partition.row_tile(q_len * a.group_size, a.head_dim)
        found.append(minimum(1, _max_split_reqs(geometry, q_len)) * partition.float_bytes(a, limit, tile))
    return maximum(*found)


def _max_split_reqs(geometry: Geometry, q_len: Any) -> Any:
    """Return the number of requests of the largest batch that splits keys."""
    most = partition.max_split_tiles(geometry.attention, geometry.device)
    return minimum(geometry.max_reqs, most // partition.uniform_tiles(geometry.attention, q_len))


def _uniform(geometry: Geometry) -> list[Mode]:
    return [mode for mode in geometry.modes if mode is not Mode.EXTEND]


def aligned(size: Any) -> Any:
    """Return `size` rounded up to the alignment of FlashInfer's arrays."""
    return ceil_div(size, partition.ALIGNMENT) * partition.ALIGNMENT


def plan_extend(geometry: Geometry, batch: ForwardBatch) -> partition.Partition:
    """Return a plan of an EXTEND batch that fits this geometry's workspaces."""
    ints, _ = plan_bytes(geometry)
    return partition.extend(geometry, batch.q_lens, host_pages(geometry, batch), float_workspace(geometry), ints)


def host_pages(geometry: Geometry, batch: ForwardBatch) -> list[int]:
    """Return the number of pages of each request in the pass over pages, from the host's lengths.

    Padding requests have prefix 0.
    """
    known = batch.host.upper_bound()
    lens = [*known, *(0 for _ in range(batch.padded_reqs - len(known)))]
    return [levels.level_pages(geometry, batch.mode, n, t) for n, t in zip(lens, batch.tail_lens, strict=True)]
