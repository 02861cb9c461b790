"""The reference backend: plain torch on any device, behind the same entry point as everybody else.

It is the embedded default, the contract's sparring partner, and the text a vendor copies: `sizing` names the
buffers, `backend` fills and reads them, `attention` is the specification of the attention itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..geometry import Geometry, Mode
from ..hookspecs import BackendInfo, hookimpl
from ..metadata import MetadataSpec
from ..version import CONTRACT_MINOR
from . import sizing

if TYPE_CHECKING:
    import torch

    from ..arena import Arena
    from ..backend import AttentionBackend
    from ..batch import ForwardBatch
    from ..buffers import BufferSpec
    from ..graphs import GraphState


@hookimpl
def draftmark_describe() -> BackendInfo:
    """Who this is."""
    return BackendInfo(
        name="reference",
        device="any",
        contract_minor=CONTRACT_MINOR,
        host_kernels=True,
        summary="plain torch on any device: the specification, not the speed",
    )


@hookimpl
def draftmark_supports(geometry: Geometry) -> list[str]:
    """Everything but quantised KV."""
    if geometry.attention.kv_dtype == "float8_e4m3fn":
        return ["kv_dtype float8_e4m3fn is not served: the reference stores KV as float32, float16 or bfloat16"]
    return []


@hookimpl
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Two index buffers; no workspace."""
    return sizing.buffers(geometry)


@hookimpl
def draftmark_metadata(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """One level over the batch's own page table, lengths including the tail."""
    return sizing.metadata(geometry)


@hookimpl
def draftmark_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Nothing opaque."""
    return {}


@hookimpl
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:
    """Bind to the arena."""
    from .backend import ReferenceBackend

    return ReferenceBackend(geometry, arena)


@hookimpl
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:
    """CUDA graphs on CUDA, recorded graphs on the CPU."""
    from ..graphs import graph_state_for

    return graph_state_for(device)
