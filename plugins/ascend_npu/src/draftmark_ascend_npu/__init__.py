"""Fused attention on Ascend NPUs, a speculation tree as a prefix and a masked tail.

`sizing` and `support` are integers, `lengths` is what the host must know, `metadata` writes the device's half, `ops` is
the only file that names torch_npu's operators, `graph` the only one that names its graphs, `backend` is the step path.
torch_npu is imported when a backend is opened on a device, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import BackendInfo, Geometry, Mode, hookimpl
from draftmark.version import CONTRACT_MINOR

from . import sizing
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark import BufferSpec, MetadataSpec
    from draftmark.arena import Arena
    from draftmark.backend import AttentionBackend
    from draftmark.batch import ForwardBatch
    from draftmark.graphs import GraphState


@hookimpl
def draftmark_describe() -> BackendInfo:
    """Who this is."""
    return BackendInfo(
        name="ascend_npu",
        device="npu",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("torch_npu",),
        install="pip install 'draftmark-ascend-npu[runtime]', in an environment with CANN",
        summary="fused attention and NPU graphs; trees as prefix and tail, merged by log-sum-exp",
    )


@hookimpl
def draftmark_supports(geometry: Geometry) -> list[str]:
    """Reasons why not."""
    return reasons_against(geometry)


@hookimpl
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Slots, block tables and a constant mask; for trees, the tail and the two partial results."""
    return sizing.buffers(geometry)


@hookimpl
def draftmark_metadata(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """Pages by request, exact host lengths, unique slots."""
    return sizing.metadata(geometry)


@hookimpl
def draftmark_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of the plugin's own buffers that one batch uses."""
    return sizing.usage(geometry, batch)


@hookimpl
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:
    """Bind to the arena."""
    from .backend import AscendBackend

    return AscendBackend(geometry, arena)


@hookimpl
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:
    """NPU graphs on an NPU; recorded graphs on the CPU, where only the metadata runs."""
    if device.type == "npu":
        from .graph import NpuGraphState

        return NpuGraphState(device)
    from draftmark.graphs import graph_state_for

    return graph_state_for(device)
