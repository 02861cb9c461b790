"""Sizes of the reference backend's buffers. Integers only."""

from __future__ import annotations

from ..buffers import BufferSpec, Role, Unit
from ..geometry import Geometry


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return two buffers: the KV length of each request and the KV slot of each row.

    The backend reads the page table and the tail mask directly from the batch.
    """
    return [
        BufferSpec("kv_lens", Role.KV_LENS, (geometry.max_reqs,), "int32", Unit.TOKENS, "max_reqs"),
        BufferSpec("slot_mapping", Role.SLOT_MAPPING, (geometry.max_rows_any,), "int64", Unit.TOKENS, "max_rows_any"),
    ]
