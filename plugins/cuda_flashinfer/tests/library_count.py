"""Bytes of FlashInfer's workspaces as FlashInfer itself counts them, on a machine with the geometry's GPU.

FlashInfer's `workspace_size` partitions the batch as its `plan` does, and writes nothing. It reads the number of SMs
from the current device, so that device must match the geometry.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from draftmark import Geometry
from draftmark.runtime import device_profile
from draftmark_cuda_flashinfer import levels, sizing
from draftmark_cuda_flashinfer.planning import Planner
from draftmark_cuda_flashinfer.vendor import Vendor

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


def library_count(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of workspace that FlashInfer counts for a batch, by buffer.

    The first call for an attention shape builds FlashInfer's module, unless it is in FlashInfer's cache.
    """
    assert device_profile("cuda") == geometry.device, "FlashInfer counts for the current GPU"
    planner, vendor, device = _planner_and_vendor(geometry)
    paged, masked = planner.requests(batch)
    floats, ints = vendor.workspace_size(paged, device)
    found = {sizing.INTS: sizing.plan_offset(geometry, batch.mode, batch.step) + ints}
    if sizing.has_floats(geometry):
        found[sizing.FLOATS] = floats
    if masked is not None:
        _, found[sizing.TAIL_INTS] = vendor.workspace_size(masked, device)
    return found


@lru_cache(maxsize=8)
def _planner_and_vendor(geometry: Geometry) -> tuple[Planner, Vendor, torch.Tensor]:
    """Return (planner, vendor, tensor on the GPU). FlashInfer's `workspace_size` takes the device from the tensor."""
    host = torch.empty(sizing.HOST_INDPTRS, geometry.max_reqs + 1, dtype=torch.int32)
    vendor = Vendor(geometry.attention, pdl=False, masked=bool(levels.masked_modes(geometry)))
    return Planner(geometry, host), vendor, torch.empty(16, dtype=torch.uint8, device="cuda")
