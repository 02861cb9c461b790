"""Memory that an engine is going to take, held against what there is before any of it is taken."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from draftmark import Geometry, LoadedBackend, RequestError

GIB = 1 << 30


def require_memory(
    groups: Iterable[tuple[Geometry, int]], loaded: LoadedBackend, device: torch.device, num_pages: int
) -> None:
    """Refuse an engine whose KV pages and backend's buffers do not fit.

    Args:
        groups: a geometry, and how many layers have it.
        num_pages: pages of each layer.

    Raises:
        RequestError: with both sums and the limit.
    """
    cache = buffers = 0
    for geometry, layers in groups:
        cache += int(geometry.page_bytes) * num_pages * layers
        buffers += sum(spec.nbytes for spec in loaded.buffers(geometry))
    most = memory_of(device)
    if most is not None and cache + buffers > most:
        raise RequestError(
            f"{num_pages:,} KV pages take {cache / GIB:,.1f} GiB and the backend's buffers {buffers / GIB:,.1f} GiB, "
            f"but {device} has {most / GIB:,.1f} GiB; take fewer requests, a shorter context or smaller pages"
        )


def memory_of(device: torch.device) -> int | None:
    """Bytes that are free on a CUDA device; of a CPU all there are, since it hands out memory when it is touched.

    None for a device that is not known here.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
