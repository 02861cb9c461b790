"""Check that an engine's memory fits on its device, before any of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from draftmark import Geometry, LoadedBackend, RequestError, StateGeometry

GIB = 1 << 30


def require_memory(
    groups: Iterable[tuple[Geometry, int]],
    loaded: LoadedBackend,
    device: torch.device,
    num_pages: int,
    states: Iterable[StateGeometry] = (),
    num_slots: int = 0,
) -> None:
    """Raise an error if the KV pages, the state slots and the backend's buffers do not fit on the device.

    Args:
        groups: pairs of a geometry and the number of layers with that geometry.
        num_pages: pages of each layer.
        states: geometries of the layers with recurrent state.
        num_slots: state slots of each of these layers.

    Raises:
        RequestError: they do not fit. The message has the bytes of the pages, of the buffers, and of the device.
    """
    cache = buffers = 0
    for geometry, layers in groups:
        cache += int(geometry.page_bytes) * num_pages * layers
        buffers += sum(spec.nbytes for spec in loaded.buffers(geometry))
    slots = 0
    for state in states:
        slots += int(state.slot_bytes) * state.num_layers * num_slots
        buffers += sum(spec.nbytes for spec in loaded.state_buffers(state))
    most = memory_of(device)
    if most is not None and cache + slots + buffers > most:
        held = f", {num_slots:,} state slots {slots / GIB:,.1f} GiB" if slots else ""
        raise RequestError(
            f"{num_pages:,} KV pages take {cache / GIB:,.1f} GiB{held} and the backend's buffers "
            f"{buffers / GIB:,.1f} GiB, but {device} has {most / GIB:,.1f} GiB; use fewer requests, a shorter context "
            "or smaller pages"
        )


def is_out_of_memory(error: Exception) -> bool:
    """Return True if Python, a device, or torch's CPU allocator ran out of memory; the last raises a RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def memory_of(device: torch.device) -> int | None:
    """Return the bytes that are free on a CUDA device, or all physical memory of a CPU; None for other devices.

    A CPU's memory is counted in full because the system assigns pages only when they are written.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
