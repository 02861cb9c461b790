"""Checks that the integer type of index buffers holds their values, at geometries with slots and sums above 2**31."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode

from ..check import SIZES, Case, ContractViolation, Tier, check
from ..layouts import Layout, MetadataSpec
from ..roles import Buffer, Role
from ..sizing.batches import BatchShape, brief, limit_batches
from ..sizing.geometries import huge_geometries, tight_geometries
from ..sizing.required_sizes import BY_LAYOUT, is_used, kv_entries, level_of, required_sizes_of

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

LARGEST = {"int8": 127, "uint8": 255, "int16": 2**15 - 1, "uint16": 2**16 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}


def _cases() -> list[Case]:
    return [*huge_geometries(), *tight_geometries()]


@check(tier=Tier.SIZING, needs=SIZES, cases=_cases, bugs=("vllm#47671", "flashinfer#3136"))
def values_fit(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Slots, page ids, lengths and prefix sums fit the integer type of their buffer, or the geometry is refused."""
    subject.require(geometry)
    geometry = subject.fit(geometry)
    metadata = subject.layouts(geometry)
    specs = subject.buffers(geometry)
    for batch in limit_batches(geometry):
        for spec in specs:
            if not is_used(spec, batch.mode, metadata):
                continue
            value = largest_value(spec, specs, batch, geometry, metadata)
            if value is not None and value > LARGEST.get(spec.dtype, -1):
                raise ContractViolation(
                    f"buffer {spec.name!r} (role {spec.role.value}) cannot hold its values in {spec.dtype}",
                    batch=f"{batch}; geometry {brief(geometry)}",
                    got=f"{spec.dtype}, at most {LARGEST.get(spec.dtype, 'no integer')}",
                    expected=f"values up to {value}",
                    formula="the dtype of the buffer, and draftmark_contract.checks.overflow.largest_value",
                    bug="vllm#47671",
                    remedy="declare int64, or refuse the geometry in supports() with this bound",
                )


def largest_slot(geometry: Geometry) -> int:
    """Return the highest KV slot of the smallest pool for a full batch: one null page, then each request's pages."""
    batches = (batch for batch in limit_batches(geometry) if batch.mode is not Mode.EXTEND)
    page = geometry.attention.page_size
    pages = max((g.count * -(-(g.prefix + g.tail) // page) for b in batches for g in b.groups), default=0)
    return (1 + pages) * page - 1


def largest_value(
    spec: Buffer, specs: list[Buffer], batch: BatchShape, geometry: Geometry, metadata: dict[Mode, MetadataSpec]
) -> int | None:
    """Return the largest number that `batch` puts into `spec`, or None for a buffer that contains no numbers."""
    page = geometry.attention.page_size
    meta = metadata[batch.mode]
    if not meta.levels and spec.role in BY_LAYOUT:
        return None
    longest = max(group.prefix + group.tail for group in batch.groups)
    if spec.role is Role.SLOT_MAPPING:
        return largest_slot(geometry)
    if spec.role is Role.KV_INDICES:
        tokens = level_of(spec, meta)[0].layout is Layout.CSR_TOKENS
        return largest_slot(geometry) if tokens else largest_slot(geometry) // page
    if spec.role is Role.PAGE_TABLE:
        return largest_slot(geometry) // page
    if spec.role is Role.KV_INDPTR:
        level = level_of(spec, meta)[0]
        return int(kv_entries(batch, level, page)) if level.layout is not Layout.PAGE_TABLE else None
    if spec.role is Role.KV_LENS:
        return int(longest)
    if spec.role is Role.QO_INDPTR:
        return int(batch.rows)
    if spec.role is Role.MASK_INDPTR:
        masks = [one for one in specs if one.role is Role.TAIL_MASK]
        needs = [need for mask in masks for need in required_sizes_of(mask, batch, geometry, metadata)]
        return max((int(need.needed) for need in needs if need.what == "words"), default=None)
    simple = {Role.KV_LAST_PAGE_LEN: page, Role.TAIL_DEPTH: max(group.tail for group in batch.groups)}
    return simple.get(spec.role)
