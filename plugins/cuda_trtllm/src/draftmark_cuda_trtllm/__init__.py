"""TensorRT-LLM's decode kernels (XQA, and trtllm-gen on sm_100 and sm_103) through FlashInfer, behind the contract.

`forms`, `sizing` and `support` are integers, `backend` is the step path, `xqa` and `gen` call the library, `launch`
starts our own `kernels`: metadata in one launch, and the rows of a draft step. EXTEND, the KV scatter and the loop's
tree operations are draftmark-cuda-triton's, imported when a backend is opened; FlashInfer when that is on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import BackendInfo, Geometry, Mode, hookimpl
from draftmark.version import CONTRACT_MINOR

from . import sizing, versions
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
    """Who this is, and by which kernels a prefill runs."""
    return BackendInfo(
        name="cuda_trtllm",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("flashinfer", "draftmark_cuda_triton", "triton"),
        install=f"pip install 'flashinfer-python=={versions.TESTED[-1]}' draftmark-cuda-triton",
        summary="TensorRT-LLM's XQA via FlashInfer: trees, drafts with topk > 1; EXTEND: cuda_triton's kernel",
    )


@hookimpl
def draftmark_supports(geometry: Geometry) -> list[str]:
    """Reasons why not."""
    return reasons_against(geometry)


@hookimpl
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Lengths, slots, masks and the kernels' scratch, by XQA's own arithmetic."""
    return sizing.buffers(geometry)


@hookimpl
def draftmark_metadata(geometry: Geometry) -> dict[Mode, MetadataSpec]:
    """One masked level over the batch's page table; lengths include the tail; no host lengths."""
    return sizing.metadata(geometry)


@hookimpl
def draftmark_usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
    """Bytes of scratch, counters and row tiles that one batch takes."""
    return sizing.usage(geometry, batch)


@hookimpl
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:
    """Bind to the arena; on a device, build and load every kernel that the geometry can ask for."""
    from . import forms

    if forms.uses_gen(geometry):
        from .gen import GenBackend

        return GenBackend(geometry, arena)
    from .backend import XqaBackend

    return XqaBackend(geometry, arena)


@hookimpl
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:
    """CUDA graphs on CUDA, recorded graphs on the CPU."""
    from draftmark.graphs import graph_state_for

    return graph_state_for(device)


@hookimpl(optionalhook=True)
def draftmark_tree_ops(geometry: Geometry, device: torch.device) -> TreeOps:
    """cuda_triton's: tail, walk and compaction in one launch each."""
    from draftmark_cuda_triton.shared import TritonTreeOps

    return TritonTreeOps(geometry)
