"""What the reference keeps between write_metadata and attend. Integers only."""

from __future__ import annotations

from ..buffers import BufferSpec, Role, Unit
from ..geometry import Geometry, Mode
from ..metadata import Layout, LengthConvention, Level, MetadataSpec


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """KV length per request and KV slot per row; page table and tail mask are read from the batch in place."""
    return [
        BufferSpec("kv_lens", Role.KV_LENS, (geometry.max_reqs,), "int32", Unit.TOKENS, "max_reqs"),
        BufferSpec("slot_mapping", Role.SLOT_MAPPING, (geometry.max_rows_any,), "int64", Unit.TOKENS, "max_rows"),
    ]


def metadata(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """The same form in every mode: one masked level over prefix and tail."""
    level = Level(
        Layout.PAGE_TABLE,
        LengthConvention.PREFIX_PLUS_TAIL,
        {"kv_lens": "kv_lens", "slot_mapping": "slot_mapping"},
        masked=True,
    )
    return {mode: MetadataSpec((level,), mask_stride=geometry.mask_words) for mode in geometry.modes}
