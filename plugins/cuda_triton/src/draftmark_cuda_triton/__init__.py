"""draftmark's own Triton kernels for NVIDIA GPUs: a speculation tree at the speed of plain attention.

The prefix is read once for all rows of a request and all heads of a group, and the tree's mask is paid for in the
last tiles only. `tiling` and `sizing` are integers, `backend` is the step path, `launch` starts `kernels`. Without a
GPU the same kernels run on CPU tensors in Triton's interpreter, for correctness.
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
    from draftmark.tree import TreeOps


@hookimpl
def draftmark_describe() -> BackendInfo:
    """Who this is."""
    return BackendInfo(
        name="cuda_triton",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=True,
        runtime=("triton",),
        install="pip install 'triton>=3.6'",
        summary="own Triton kernels: prefix once, tail masked, device-built schedule",
    )


@hookimpl
def draftmark_supports(geometry: Geometry) -> list[str]:
    """Reasons why not."""
    return reasons_against(geometry)


@hookimpl
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Slots, schedule and partials; no term in requests times length."""
    return sizing.buffers(geometry)


@hookimpl
def draftmark_metadata(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """One masked level over the batch's own tensors; no host lengths."""
    return sizing.metadata(geometry)


@hookimpl
def draftmark_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of schedule and partials that one batch takes."""
    return sizing.usage(geometry, batch)


@hookimpl
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:
    """Bind to the arena; on CPU tensors, in Triton's interpreter."""
    from .backend import TritonBackend

    return TritonBackend(geometry, arena)


@hookimpl
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:
    """CUDA graphs on CUDA, recorded graphs on the CPU."""
    from draftmark.graphs import graph_state_for

    return graph_state_for(device)


@hookimpl(optionalhook=True)
def draftmark_tree_ops(geometry: Geometry, device: torch.device) -> TreeOps:
    """Tail, walk and compaction in one launch each."""
    from .tree_ops import TritonTreeOps

    return TritonTreeOps(geometry)
