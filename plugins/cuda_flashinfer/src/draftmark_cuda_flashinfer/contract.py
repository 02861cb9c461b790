"""What the conformance suite reads of this plugin, and no engine: the meaning of its metadata, and bytes in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import Geometry, Mode, Role
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec

from . import levels, library, partition, sizing

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """One causal level over prefix and tail; where the tail may be a tree, a prefix and a masked tail.

    With a window the masked level also holds tokens of the prefix, which no layout of the contract describes: opaque.
    """
    paged = {
        "kv_indptr": sizing.INDPTR,
        "kv_indices": sizing.PAGES,
        "kv_last_page_len": sizing.LAST_PAGE,
        "slot_mapping": sizing.SLOTS,
    }
    tokens = {
        "kv_indptr": sizing.TAIL_INDPTR,
        "kv_indices": sizing.TAIL_SLOTS,
        "kv_last_page_len": sizing.TAIL_LAST_PAGE,
        "tail_mask": sizing.MASK,
        "mask_indptr": sizing.MASK_INDPTR,
        "slot_mapping": sizing.SLOTS,
    }
    windowed = geometry.attention.window_left >= 0
    pages, slots = (Layout.OPAQUE, Layout.OPAQUE) if windowed else (Layout.CSR_PAGES, Layout.CSR_TOKENS)
    causal = (Level(Layout.CSR_PAGES, LengthConvention.PREFIX_PLUS_TAIL, paged, masked=True),)
    two = (Level(pages, LengthConvention.PREFIX, paged), Level(slots, LengthConvention.TAIL, tokens, masked=True))
    tree = MetadataSpec(two, mask_dtype="uint8")
    chain = MetadataSpec(causal)
    return {mode: tree if levels.is_masked(geometry, mode) else chain for mode in geometry.modes}


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of workspaces, partial results and staging that one batch takes.

    FlashInfer's workspaces are FlashInfer's own count where the geometry's device is at hand, else the plugin's.
    """
    return counted(geometry, batch) | library.usage(geometry, batch)


def counted(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes that one batch takes of the plugin's own buffers, by the plugin's own count.

    Its plans, and what their kernels write. A draft step's plan lies behind those of the steps before it, which count.
    """
    used = {spec.name: 0 for spec in sizing.buffers(geometry) if spec.role in _OWN}
    a, extent = geometry.attention, batch.uniform
    ints, tail_ints = sizing.plan_bytes(geometry)
    used[sizing.STAGING] = sizing.staging_slots(geometry) * (sizing.aligned(ints) + sizing.aligned(tail_ints))
    used[sizing.HOST_INDPTR] = sizing.HOST_INDPTRS * 4 * (batch.padded_reqs + 1)
    if extent is None:
        plan = sizing.plan_extend(geometry, batch)
    else:
        plan = partition.uniform(geometry, extent.q_len, batch.padded_reqs)
        if levels.is_masked(geometry, batch.mode):
            length = levels.masked_len(geometry, extent.tail_len)
            used[sizing.TAIL_INTS] = partition.masked(geometry, extent.q_len, batch.padded_reqs, length).int_bytes
            heads = batch.padded_reqs * extent.q_len * a.num_qo_heads
            used[sizing.TAIL_OUT], used[sizing.LSE], used[sizing.TAIL_LSE] = (
                heads * a.head_dim * 2,
                heads * 4,
                heads * 4,
            )
    used[sizing.INTS] = sizing.plan_offset(geometry, batch.mode, batch.step) + plan.int_bytes
    if sizing.FLOATS in used:
        used[sizing.FLOATS] = plan.float_bytes
    return used


_OWN = (Role.WORKSPACE, Role.PARTIAL_OUT, Role.PARTIAL_LSE, Role.HOST_STAGING)
