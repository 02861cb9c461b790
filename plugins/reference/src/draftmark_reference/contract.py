"""Notes of the reference backend for the conformance suite: the meaning of its buffers. Needs draftmark-contract."""

from __future__ import annotations

from draftmark import Geometry, Mode
from draftmark_contract.layouts import MetadataSpec, over_page_table


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Return the layout of each mode's metadata: one masked attention call over the page table, tail included."""
    return over_page_table(geometry, kv_lens="kv_lens", slot_mapping="slot_mapping")
