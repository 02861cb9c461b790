"""Memory that the backends will take, held while vLLM measures how much a step takes beside KV.

vLLM makes its metadata builders, and so our arenas, after it has given the rest of the device to KV; what it measures
before is a forward without metadata. So the first such forward allocates as much, and the first builder frees it.
"""

from __future__ import annotations

import torch

_held: dict[object, torch.Tensor] = {}


def hold(key: object, nbytes: int, device: torch.device) -> None:
    """Hold `nbytes` for one shape of layer, once."""
    if key not in _held and device.type != "cpu":
        _held[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)


def release() -> None:
    """Free all that is held."""
    _held.clear()
