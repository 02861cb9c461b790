"""Descriptions of this plugin for the conformance suite only: its metadata layout, and the bytes that a batch uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import Geometry, Mode
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec, over_page_table

from . import latent_plan, levels, partition, sizing

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Describe each mode's metadata: one causal pass, or for trees a prefix pass and a masked pass over draft tokens.

    With a sliding window the masked pass also reads prefix tokens. The contract cannot describe that, so its metadata
    is declared opaque. Latent rows are read over the batch's page table.
    """
    if geometry.attention.latent:
        return over_page_table(geometry, slot_mapping=latent_plan.SLOTS)
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


def roundoffs(geometry: Geometry, mode: Mode) -> int:
    """Return the largest error in unit roundoffs: 4 in the modes of trees, which run two passes, else the usual 3.

    FlashInfer rounds the weights, its partial outputs where it splits keys, and the output of a pass. The merged result
    of both passes is rounded again. Chains, prompts and blocks run one pass.
    """
    latent = geometry.attention.latent
    return 4 if (latent_plan.may_run_two_passes if latent else levels.is_masked)(geometry, mode) else 3


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of workspaces, partial results and staging that one batch uses, by buffer.

    The bytes include the plan and the data that its kernels write. A draft step's plan begins after the plans of
    earlier steps, so its bytes count from the buffer's start. The numbers come from the plugin's formulas, which need
    neither torch nor a GPU. Device tests compare them with FlashInfer's own count.
    """
    if geometry.attention.latent:
        return latent_plan.usage(geometry, batch)
    used = {spec.name: 0 for spec in sizing.buffers(geometry) if spec.name not in sizing.METADATA}
    a, q_len = geometry.attention, batch.q_lens[0]
    ints, tail_ints = sizing.plan_bytes(geometry)
    used[sizing.STAGING] = sizing.staging_slots(geometry) * (sizing.aligned(ints) + sizing.aligned(tail_ints))
    used[sizing.HOST_INDPTR] = sizing.HOST_INDPTRS * 4 * (batch.padded_reqs + 1)
    if not batch.uniform:
        plan = sizing.plan_extend(geometry, batch)
    else:
        plan = partition.uniform(geometry, q_len, batch.padded_reqs)
        if levels.is_masked(geometry, batch.mode):
            length = levels.masked_len(geometry, batch.tail_lens[0])
            used[sizing.TAIL_INTS] = partition.masked(geometry, q_len, batch.padded_reqs, length).int_bytes
            heads = batch.padded_reqs * q_len * a.num_qo_heads
            used[sizing.TAIL_OUT], used[sizing.LSE], used[sizing.TAIL_LSE] = (
                heads * a.head_dim * 2,
                heads * 4,
                heads * 4,
            )
    used[sizing.INTS] = sizing.plan_offset(geometry, batch.mode, batch.step) + plan.int_bytes
    if sizing.FLOATS in used:
        used[sizing.FLOATS] = plan.float_bytes
    return used
