"""draftmark over FlashInfer's FA2 kernels: trees as an unmasked prefix and a masked tail.

The prefix is read once for all rows of a request; the mask covers the tail's slots alone, so no buffer grows with rows
times context. `levels`, `partition` and `sizing` are integers, `planning` is what FlashInfer's planner is asked,
`backend` is the step path, `vendor` is every call into FlashInfer, `library` has it count its workspaces itself.
`launch` starts the two Triton kernels of `kernels` that fill index buffers and store new keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import BackendInfo, Geometry, Mode, available, hookimpl, load
from draftmark.version import CONTRACT_MINOR

from . import library, sizing
from .support import reasons_against
from .version import INSTALL

if TYPE_CHECKING:
    import torch

    from draftmark import BufferSpec, MetadataSpec
    from draftmark.arena import Arena
    from draftmark.backend import AttentionBackend
    from draftmark.batch import ForwardBatch
    from draftmark.graphs import GraphState
    from draftmark.tree import TreeOps

TREE_OPS_OF = "cuda_triton"
"""The backend whose tree operations this one offers: FlashInfer has none."""


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
    """Bytes of workspaces, partial results and staging that one batch takes.

    FlashInfer's workspaces are FlashInfer's own count where the geometry's device is at hand, else the plugin's.
    """
    return sizing.usage(geometry, batch) | library.usage(geometry, batch)


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


@hookimpl(optionalhook=True)
def draftmark_tree_ops(geometry: Geometry, device: torch.device) -> TreeOps | None:
    """cuda_triton's, one launch each, on a GPU where that backend is installed; None leaves torch's to serve."""
    if device.type != "cuda" or all(row.name != TREE_OPS_OF for row in available()):
        return None
    return load(TREE_OPS_OF).tree_ops(geometry, device)
