"""What the conformance suite reads of the reference: the meaning of its two buffers. Needs draftmark-contract."""

from __future__ import annotations

from draftmark_contract.layouts import MetadataSpec, over_page_table

from ..geometry import Geometry, Mode


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """The same form in every mode: one masked level over the batch's own page table, lengths including the tail."""
    return over_page_table(geometry, kv_lens="kv_lens", slot_mapping="slot_mapping")
