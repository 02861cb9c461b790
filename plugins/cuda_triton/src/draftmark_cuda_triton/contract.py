"""What the conformance suite reads of this plugin, and no engine: the meaning of its metadata, and bytes in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import Geometry, Mode
from draftmark_contract.layouts import MetadataSpec, over_page_table

from . import sizing

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """The same form in every mode: one masked level over the batch's own page table, mask and lengths."""
    return over_page_table(geometry, slot_mapping=sizing.SLOTS)


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes that one batch takes of the plugin's own buffers; of partials, at most."""
    used = {spec.name: 0 for spec in sizing.buffers(geometry) if spec.name != sizing.SLOTS}
    extent = batch.uniform
    if extent is None:
        used[sizing.ROW_TILES] = sizing.ragged_tiles(geometry, batch.num_rows, batch.padded_reqs) * 2 * 4
    else:
        pieces, rows = sizing.cut(geometry, extent.q_len, batch.padded_reqs)
        used[sizing.WORK] = pieces * 4 * 4
        used[sizing.PARTIAL_OUT], used[sizing.PARTIAL_LSE] = rows * geometry.attention.head_dim * 4, rows * 4
    return used
