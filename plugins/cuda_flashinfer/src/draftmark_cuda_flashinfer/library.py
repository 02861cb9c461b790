"""FlashInfer's own count of its workspaces, for `usage()` on a machine that has the GPU.

`workspace_size` of the library partitions the batch as its plan does, and writes nothing. It reads the number of
multiprocessors from the device at hand, so it is asked only where that is the device that the geometry names.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from draftmark import DeviceProfile, Geometry

from . import levels, sizing
from .version import TESTED, installed

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import ForwardBatch

    from .planning import Planner
    from .vendor import Vendor


def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of FlashInfer's workspaces, as it counts them itself, by buffer; empty where it cannot be asked.

    The first query of an attention shape builds FlashInfer's module, unless it is in its cache.
    """
    if not answers_for(geometry.device):
        return {}
    planner, vendor, device = _asked(geometry)
    paged, masked = planner.requests(batch)
    floats, ints = vendor.workspace_size(paged, device)
    found = {sizing.INTS: sizing.plan_offset(geometry, batch.mode, batch.step) + ints}
    if sizing.has_floats(geometry):
        found[sizing.FLOATS] = floats
    if masked is not None:
        _, found[sizing.TAIL_INTS] = vendor.workspace_size(masked, device)
    return found


@cache
def answers_for(device: DeviceProfile) -> bool:
    """Whether the tested FlashInfer and the very device are here."""
    if device.kind != "cuda" or installed() != TESTED or importlib.util.find_spec("torch") is None:
        return False
    import torch

    from draftmark.runtime import device_profile

    return torch.cuda.is_available() and device_profile("cuda") == device


@lru_cache(maxsize=8)
def _asked(geometry: Geometry) -> tuple[Planner, Vendor, torch.Tensor]:
    """Planner, vendor, and a tensor that names the device."""
    import torch

    from .planning import Planner
    from .vendor import Vendor

    host = torch.empty(sizing.HOST_INDPTRS, geometry.max_reqs + 1, dtype=torch.int32)
    vendor = Vendor(geometry.attention, pdl=False, masked=bool(levels.masked_modes(geometry)))
    return Planner(geometry, host), vendor, torch.empty(16, dtype=torch.uint8, device="cuda")
