"""Bytes of FlashInfer's workspaces as FlashInfer itself counts them, on a machine with the geometry's GPU.

FlashInfer's `workspace_size` partitions the batch as its `plan` does, and writes nothing. It reads the number of SMs
from the current device, so it is called only if that device matches the geometry.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from draftmark import DeviceProfile, Geometry

from . import levels, sizing
from .version import ACCEPTED, installed

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import ForwardBatch

    from .planning import Planner
    from .vendor import Vendor


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Return the bytes of workspace that FlashInfer counts for a batch, by buffer; empty without the geometry's GPU.

    The first call for an attention shape builds FlashInfer's module, unless it is in FlashInfer's cache.
    """
    if not has_device(geometry.device):
        return {}
    planner, vendor, device = _planner_and_vendor(geometry)
    paged, masked = planner.requests(batch)
    floats, ints = vendor.workspace_size(paged, device)
    found = {sizing.INTS: sizing.plan_offset(geometry, batch.mode, batch.step) + ints}
    if sizing.has_floats(geometry):
        found[sizing.FLOATS] = floats
    if masked is not None:
        _, found[sizing.TAIL_INTS] = vendor.workspace_size(masked, device)
    return found


@cache
def has_device(device: DeviceProfile) -> bool:
    """Return true if an accepted FlashInfer is installed and the current GPU equals `device`."""
    if device.kind != "cuda" or installed() not in ACCEPTED or importlib.util.find_spec("torch") is None:
        return False
    import torch

    from draftmark.runtime import device_profile

    return torch.cuda.is_available() and device_profile("cuda") == device


@lru_cache(maxsize=8)
def _planner_and_vendor(geometry: Geometry) -> tuple[Planner, Vendor, torch.Tensor]:
    """Return (planner, vendor, tensor on the GPU). FlashInfer's `workspace_size` takes the device from the tensor."""
    import torch

    from .planning import Planner
    from .vendor import Vendor

    host = torch.empty(sizing.HOST_INDPTRS, geometry.max_reqs + 1, dtype=torch.int32)
    vendor = Vendor(geometry.attention, pdl=False, masked=bool(levels.masked_modes(geometry)))
    return Planner(geometry, host), vendor, torch.empty(16, dtype=torch.uint8, device="cuda")
