"""draftmark over FlashInfer's FA2 kernels: trees as an unmasked prefix and a masked tail.

The prefix is read once for all rows of a request; the mask covers the tail's slots alone, so no buffer grows with rows
times context. `levels`, `partition` and `sizing` are integers, `backend` is the step path, `vendor` is every call into
FlashInfer, `launch` starts the two Triton kernels of `kernels` that fill index buffers and store new keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import BackendInfo, Geometry, Mode, hookimpl
from draftmark.version import CONTRACT_MINOR

from . import sizing
from .support import reasons_against
from .version import INSTALL

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
        name="cuda_flashinfer",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("flashinfer", "triton"),
        install=INSTALL,
        summary="FlashInfer's FA2 kernels: prefix unmasked, tail masked, merged",
    )


@hookimpl
def draftmark_supports(geometry: Geometry) -> list[str]:
    """Reasons why not; FlashInfer itself is not imported."""
    return reasons_against(geometry)


@hookimpl
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Page ids, tails, and FlashInfer's workspaces to the byte."""
    return sizing.buffers(geometry)


@hookimpl
def draftmark_metadata(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """One causal level, or a prefix and a masked tail."""
    return sizing.metadata(geometry)


@hookimpl
def draftmark_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of workspaces, partial results and staging that one batch takes."""
    return sizing.usage(geometry, batch)


@hookimpl
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:
    """Bind to the arena. On a GPU this compiles FlashInfer's modules, unless they are in its cache."""
    from .backend import FlashInferBackend

    return FlashInferBackend(geometry, arena)


@hookimpl
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:
    """CUDA graphs on CUDA, recorded graphs on the CPU."""
    from draftmark.graphs import graph_state_for

    return graph_state_for(device)
