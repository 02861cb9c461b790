"""Descriptions of this plugin for the conformance suite only: its metadata layout, and the bytes that a batch uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import Geometry, Mode, ceil_div
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec, over_page_table

from . import forms, gen_sizing, sizing

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Describe each mode's metadata: one masked pass over the batch's page table; KV lengths include the new tokens."""
    if forms.uses_gen(geometry):
        return over_page_table(geometry, kv_lens=gen_sizing.LENS, slot_mapping=gen_sizing.SLOTS, **_own_table(geometry))
    return {mode: _meaning(geometry, mode) for mode in geometry.modes}


def _own_table(geometry: Geometry) -> dict[str, str]:
    """Return the role and name of the plugin's page table, which layers with a window have."""
    return {"page_table": sizing.PAGES} if sizing.visible_table(geometry) else {}


def _meaning(geometry: Geometry, mode: Mode) -> MetadataSpec:
    named = {"slot_mapping": sizing.SLOTS}
    if mode not in (Mode.EXTEND, *forms.SIBLING_MODES):
        named |= {"kv_lens": sizing.LENS, **_own_table(geometry)}
    if mode not in forms.masked_modes(geometry):
        level = Level(Layout.PAGE_TABLE, LengthConvention.PREFIX_PLUS_TAIL, named, masked=True)
        return MetadataSpec((level,), mask_stride=geometry.mask_words)
    named |= {"tail_mask": sizing.MASK, "qo_indptr": sizing.INDPTR}
    if mode is Mode.DRAFT and forms.stages(geometry):
        named |= {"query_staging": sizing.QUERIES, "output_staging": sizing.OUTPUTS}
    level = Level(Layout.PAGE_TABLE, LengthConvention.PREFIX_PLUS_TAIL, named, masked=True)
    stride = 2 * forms.mask_words(geometry, mode)
    return MetadataSpec((level,), mask_stride=stride, mask_dtype="uint16", dummy_rows="last")


def roundoffs(geometry: Geometry, mode: Mode) -> int:
    """Return the largest error in unit roundoffs: 5 in the modes of XQA, else the usual 3.

    XQA (`xqa/mha.cu` of FlashInfer) merges at two levels in 16 bit. It rounds a weight, the factor to a new maximum and
    their product, each warp group's result, and their sum. The CTAs of a split merge in the same way. These are more
    than 5 roundings, but in one element they rarely add up. The largest error was 3.8 roundoffs on an H200 and 4.6 in a
    simulation. trtllm-gen's kernels were never run.
    """
    by_xqa = mode in forms.uniform_modes(geometry) and not forms.uses_gen(geometry)
    return 5 if by_xqa else 3


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes that one batch uses of each buffer of the plugin.

    For the row tiles of EXTEND the number is an upper bound. Semaphores always count in full, because they are zeroed
    once for all batches.
    """
    if forms.uses_gen(geometry):
        return _gen_usage(geometry, batch)
    used = {spec.name: 0 for spec in sizing.buffers(geometry) if spec.name not in sizing.METADATA}
    if batch.mode in forms.SIBLING_MODES:
        from draftmark_cuda_triton.shared_sizing import decode_verify_usage

        return used | decode_verify_usage(geometry, geometry.extent(batch.mode).q_len, batch.padded_reqs)
    if not batch.uniform:
        used[sizing.ROW_TILES] = forms.row_tiles(geometry, batch.num_rows, batch.padded_reqs) * 2 * 4
        return used
    used[sizing.SCRATCH] = _used_scratch(geometry, batch.padded_reqs, _kernel_rows(geometry, batch))
    used[sizing.SEMAPHORES] = next(spec.nbytes for spec in sizing.workspace(geometry) if spec.name == sizing.SEMAPHORES)
    if sizing.Q_SCALE in used:
        used[sizing.Q_SCALE] = 4
    return used


def _kernel_rows(geometry: Geometry, batch: ForwardBatch) -> int:
    """Return the rows per request that XQA's grid covers; 1 for the kernel without a mask."""
    if batch.uniform and batch.q_lens[0] == 1 and not forms.is_fp8(geometry):
        return 1
    return int(forms.q_rows(geometry, batch.mode))


def _used_scratch(geometry: Geometry, requests: int, rows: int) -> int:
    a = geometry.attention
    width = geometry.max_pages_per_req * a.page_size
    parts = min(max(1, geometry.device.num_sms // max(1, requests * a.num_kv_heads)), ceil_div(width, forms.KV_TILE))
    if parts == 1:
        return 0
    blocks = 1 if rows == 1 else forms.blocks(a.group_size, rows)
    held = a.group_size if rows == 1 else forms.BLOCK_ROWS
    return int(sizing.scratch(geometry, parts * requests * a.num_kv_heads * blocks, held))


def _gen_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes that a batch uses on trtllm-gen: counters by formula, and the whole workspace.

    The kernels are closed binaries, so the part of the workspace that they use is unknown.
    """
    return {
        gen_sizing.COUNTERS: 4 * gen_sizing.counters(geometry, batch.padded_reqs),
        gen_sizing.WORKSPACE: gen_sizing.WORKSPACE_BYTES,
    }
