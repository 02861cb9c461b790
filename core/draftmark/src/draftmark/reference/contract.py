"""Notes of the reference backend for the conformance suite: the meaning of its buffers. Needs draftmark-contract."""

from __future__ import annotations

from draftmark_contract.layouts import MetadataSpec, over_page_table

from ..geometry import Geometry, Mode


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Return one layout for every mode: one masked attention pass over the page table; lengths include the tail."""
    return over_page_table(geometry, kv_lens="kv_lens", slot_mapping="slot_mapping")
