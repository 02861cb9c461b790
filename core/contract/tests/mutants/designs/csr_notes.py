"""Declarations of the CSR backend's metadata, which only the suite reads."""

from __future__ import annotations

from draftmark import Geometry, Mode
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec

from .csr_plugin import MASKED

ROLES = {
    "kv_indptr": "kv_indptr",
    "kv_indices": "kv_indices",
    "kv_last_page_len": "kv_last_page_len",
    "qo_indptr": "qo_indptr",
    "slot_mapping": "slot_mapping",
}


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Declare one attention pass over prefix and tail by pages, and the tail mask for modes with a tree."""
    found = {}
    for mode in geometry.modes:
        extra = {"tail_mask": "tail_mask", "tail_depth": "tail_depth"} if mode in MASKED else {}
        level = Level(Layout.CSR_PAGES, LengthConvention.PREFIX_PLUS_TAIL, {**ROLES, **extra}, masked=True)
        found[mode] = MetadataSpec((level,), mask_stride=geometry.mask_words)
    return found
