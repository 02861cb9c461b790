"""Descriptions for the conformance suite: the layout of the plugin's metadata, and the bytes that a batch uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import Geometry, Mode
from draftmark_contract.layouts import MetadataSpec, over_page_table
from draftmark_contract.roles import Role

from . import sizing
from .state.extend_sizing import SCRATCH
from .state.sizing import MATRICES, TOTALS

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


roles = dict.fromkeys((TOTALS, MATRICES, *SCRATCH), Role.WORKSPACE)
"""Buffers of recurrent layers that no commit reads."""


def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Return the metadata layout of each mode: one masked level over the batch's page table, mask and lengths."""
    return over_page_table(geometry, slot_mapping=sizing.SLOTS)


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of the plugin's own buffers that one batch uses, by buffer name.

    The bytes of partial results are an upper bound.
    """
    if geometry.attention.chosen_width:
        return sizing.chosen_usage(geometry, batch.mode, batch.num_rows)
    # Only the names of the buffers are needed here. Computing every buffer's size for each batch would dominate the run
    # time of the sizing checks.
    used = dict.fromkeys(sizing.SPLIT_BUFFERS, 0)
    if Mode.EXTEND in geometry.modes:
        used[sizing.ROW_TILES] = 0
        if sizing.upcasts(geometry):
            used |= dict.fromkeys(sizing.UPCAST, 0)
    if batch.mode is Mode.EXTEND:
        used |= sizing.upcast_usage(geometry, batch) or sizing.prefill_usage(geometry, batch)
    else:
        used |= sizing.decode_verify_usage(geometry, geometry.extent(batch.mode).q_len, batch.padded_reqs)
    return used
