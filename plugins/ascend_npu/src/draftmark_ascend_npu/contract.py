"""Describes the plugin to the conformance suite: the meaning of its metadata, and the bytes that a batch uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import DTYPE_BYTES, Geometry, Mode
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec
from draftmark_contract.roles import Role

from . import sizing

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


roles = {sizing.TAIL_MASK: Role.WORKSPACE}
"""The attention mask of the tail's pass, by query and key; no packed words."""


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Describe each mode's metadata: one pass over prefix and tail, or a pass over each if the mode can have trees."""
    named = {"page_table": sizing.TABLES, "slot_mapping": sizing.SLOTS}
    whole = Level(Layout.PAGE_TABLE, LengthConvention.PREFIX_PLUS_TAIL, named, masked=True)
    prefix = Level(Layout.PAGE_TABLE, LengthConvention.PREFIX, named)
    tail = Level(Layout.PAGE_TABLE, LengthConvention.TAIL, named, masked=True)
    trees = sizing.tree_modes(geometry)
    return {
        mode: MetadataSpec((prefix, tail) if mode in trees else (whole,), mask_stride=geometry.mask_words)
        for mode in geometry.modes
    }


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes that one batch uses of each buffer of the plugin."""
    used = {spec.name: 0 for spec in sizing.buffers(geometry) if spec.name not in (sizing.SLOTS, sizing.TABLES)}
    used[sizing.TRIANGLE] = sizing.TRIANGLE_SIDE * sizing.TRIANGLE_SIDE
    used[sizing.HOST_LENS] = batch.padded_reqs * 4
    used[sizing.SLOTS32] = batch.num_rows * 4
    a = geometry.attention
    if a.latent:
        widths = {name: a.value_width for name in (sizing.QUERIES, sizing.OUTPUTS)}
        row = sizing.padded_heads(a.num_qo_heads) * DTYPE_BYTES[a.q_dtype]
        used |= {name: batch.num_rows * row * width for name, width in widths.items()}
        if batch.mode is Mode.EXTEND:
            used[sizing.PIECE_TABLES] = sum(sizing.pieces(batch.q_lens)) * geometry.max_pages_per_req * 4
        used[sizing.QUERY_RESTS] = batch.num_rows * row * (a.head_dim - a.value_width)
    if batch.mode not in sizing.tree_modes(geometry) or not batch.uniform:
        return used
    extent = geometry.extent(batch.mode, batch.step)
    reqs, rows, slots, pairs = sizing.mode_extents(batch.padded_reqs, extent)
    element, heads = DTYPE_BYTES[a.q_dtype], rows * a.num_qo_heads
    bits = 32 * geometry.mask_words * sizing.mode_extents(1, extent)[0]
    used |= {
        sizing.BITS: bits * 4,
        sizing.WORD_OF: bits * 4,
        sizing.TAIL_SLOTS: slots * 8,
        sizing.TAIL_MASK: pairs,
        sizing.HAS_PREFIX: reqs * 4,
    }
    if a.latent:
        return used | {sizing.LSES: rows * sizing.padded_heads(a.num_qo_heads) * 4}
    return used | {
        sizing.TAIL_KV: 2 * slots * a.num_kv_heads * a.head_dim * element,
        sizing.PARTS: 2 * heads * a.head_dim * element,
        sizing.LSES: 2 * heads * 4,
        sizing.WEIGHT: heads * 4,
        sizing.MERGE: 2 * heads * a.head_dim * 4,
    }
