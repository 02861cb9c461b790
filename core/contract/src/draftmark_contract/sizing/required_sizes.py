"""Sizing oracle: computes the size that a batch needs in every buffer.

The formulas follow the meaning of each buffer role and share no code with plugins. They use only the limits that bound
a batch, not `Geometry`'s formulas for request lengths. They work on integers or symbolic integers, without torch and
without branches on values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftmark.geometry import DTYPE_BYTES, Geometry, Mode

from ..layouts import Layout, LengthConvention, Level, MetadataSpec
from ..oracle.formulas import pages
from ..roles import Buffer, Role
from .batches import BatchShape, Group, total

PER_REQUEST = {
    Role.KV_LENS: 0,
    Role.KV_LAST_PAGE_LEN: 0,
    Role.KV_INDPTR: 1,
    Role.QO_INDPTR: 1,
    Role.MASK_INDPTR: 1,
}
"""Roles with one entry per request, and the number of additional entries."""

BY_LAYOUT = frozenset({Role.KV_INDICES, Role.KV_INDPTR, Role.PAGE_TABLE, Role.TAIL_MASK})
"""Roles with sizes or values that depend on the layout; without a declared layout they need no size."""


@dataclass(frozen=True)
class RequiredSize:
    """States the size that one buffer must have: ``needed <= declared``.

    Attributes:
        buffer: name of the buffer.
        what: extent that is compared, e.g. ``"columns"``.
        needed, declared: ints or symbolic ints.
        why: formula of the needed size, in words.
    """

    buffer: str
    what: str
    needed: Any
    declared: Any
    why: str


def required_sizes_of(
    spec: Buffer, batch: BatchShape, geometry: Geometry, metadata: dict[Mode, MetadataSpec]
) -> list[RequiredSize]:
    """Return the sizes that `batch` needs in the buffer `spec`; empty for roles that only `usage()` can compute."""
    meta = metadata[batch.mode]
    per_request = PER_REQUEST.get(spec.role)
    if per_request is not None:
        text = "one per request" + (", and one" if per_request else "")
        return [RequiredSize(spec.name, "entries", batch.requests + per_request, spec.numel, text)]
    if not meta.levels and spec.role in BY_LAYOUT:
        return []
    if spec.role is Role.KV_INDICES:
        level, guessed = level_of(spec, meta)
        text = f"sum over requests of {level.layout.value} of {level.lengths.value}{guessed}"
        entries = kv_entries(batch, level, geometry.attention.page_size)
        return [RequiredSize(spec.name, "entries", entries, spec.numel, text)]
    if spec.role is Role.PAGE_TABLE:
        return _page_table(spec, batch, geometry, meta)
    if spec.role is Role.TAIL_MASK:
        return _tail_mask(spec, batch, meta)
    if spec.role in (Role.SLOT_MAPPING, Role.POSITIONS):
        text = "one per query row, padding rows too"
        return [RequiredSize(spec.name, "entries", batch.rows, spec.numel, text)]
    if spec.role in (Role.CHOSEN_SLOTS, Role.CHOSEN_COUNTS):
        width = geometry.attention.chosen_width if spec.role is Role.CHOSEN_SLOTS else 1
        return [RequiredSize(spec.name, "entries", batch.rows * width, spec.numel, "a list per query row")]
    if spec.role is Role.TAIL_DEPTH:
        slots = total(group.count * group.tail for group in batch.groups)
        return (
            [] if batch.mode is Mode.EXTEND else [RequiredSize(spec.name, "slots", slots, spec.numel, "T per request")]
        )
    if spec.role in (Role.QUERY_STAGING, Role.OUTPUT_STAGING):
        a = geometry.attention
        one, of = (a.head_dim, "head_dim") if spec.role is Role.QUERY_STAGING else (a.value_width, "value_width")
        elements = batch.rows * a.num_qo_heads * one
        return [RequiredSize(spec.name, "elements", elements, spec.numel, f"rows · num_qo_heads · {of}")]
    return []


def kv_entries(batch: BatchShape, level: Level, page_size: Any) -> Any:
    """Return the entries that a CSR attention pass needs: pages or tokens of all requests in its range."""
    if batch.mode is Mode.EXTEND and level.layout is Layout.CSR_TOKENS and level.lengths is LengthConvention.TAIL:
        # An EXTEND request has one tail slot (new token) per row, and only the sum of the rows is bounded.
        return batch.rows
    return total(group.count * _positions(group, level, page_size) for group in batch.groups)


def level_of(spec: Buffer, meta: MetadataSpec) -> tuple[Level, str]:
    """Return the attention pass that names this buffer. If none does, return the strictest pass and a note."""
    for level in meta.levels:
        if level.buffers.get(spec.role.value) == spec.name:
            return level, ""
    layout = Layout.CSR_TOKENS if spec.by_token else Layout.CSR_PAGES
    return Level(layout, LengthConvention.PREFIX_PLUS_TAIL), " (no level of this mode names the buffer)"


def is_used(spec: Buffer, mode: Mode, metadata: dict[Mode, MetadataSpec]) -> bool:
    """Return True if `mode` writes this buffer: its passes name the buffer, or the passes of no mode do."""
    return _names(metadata[mode], spec) or not any(_names(meta, spec) for meta in metadata.values())


def _names(meta: MetadataSpec, spec: Buffer) -> bool:
    return any(spec.name in level.buffers.values() for level in meta.levels)


def _positions(group: Group, level: Level, page_size: Any) -> Any:
    if level.layout is Layout.NONE:
        return 0
    counted = {
        LengthConvention.PREFIX: group.prefix,
        LengthConvention.PREFIX_PLUS_TAIL: group.prefix + group.tail,
        LengthConvention.TAIL: group.tail,
    }[level.lengths]
    if level.layout is Layout.CSR_TOKENS:
        return counted
    # Count the pages of the T tail positions (new tokens), which may begin inside a page.
    if level.lengths is LengthConvention.TAIL:
        return pages(group.prefix + group.tail, page_size) - group.prefix // page_size
    return pages(counted, page_size)


def _page_table(spec: Buffer, batch: BatchShape, geometry: Geometry, meta: MetadataSpec) -> list[RequiredSize]:
    level, guessed = level_of(spec, meta)
    if not guessed and level.layout is not Layout.PAGE_TABLE:
        return []
    paged = Level(Layout.PAGE_TABLE, level.lengths)
    found = [RequiredSize(spec.name, "rows", batch.requests, _rows(spec), "one row per request")]
    for group in batch.groups:
        columns = _positions(group, paged, geometry.attention.page_size)
        found.append(
            RequiredSize(spec.name, "columns", columns, spec.shape[-1], f"pages of {level.lengths.value}{guessed}")
        )
    return found


def _tail_mask(spec: Buffer, batch: BatchShape, meta: MetadataSpec) -> list[RequiredSize]:
    if batch.mode not in (Mode.VERIFY, Mode.DRAFT):
        return []  # All other modes are causal and have no mask words.
    bits = 8 * DTYPE_BYTES[spec.dtype]
    if any(Role.MASK_INDPTR.value in level.buffers for level in meta.levels):
        words = total(g.count * pages(g.rows * g.tail, bits) for g in batch.groups)
        return [RequiredSize(spec.name, "words", words, spec.numel, f"sum over requests of ceil(q · T / {bits})")]
    stride = meta.mask_stride if _is_given(meta.mask_stride) else spec.shape[-1]
    found = [
        RequiredSize(spec.name, "bits of a row", g.tail, stride * bits, "one bit per tail slot") for g in batch.groups
    ]
    return [*found, RequiredSize(spec.name, "words", batch.rows * stride, spec.numel, "rows · mask_stride")]


def _is_given(stride: Any) -> bool:
    return not (isinstance(stride, int) and stride == 0)


def _rows(spec: Buffer) -> Any:
    count: Any = 1
    for extent in spec.shape[:-1]:
        count = count * extent
    return count
