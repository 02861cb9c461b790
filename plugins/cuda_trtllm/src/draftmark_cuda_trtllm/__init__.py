"""TensorRT-LLM's decode kernels (XQA, and trtllm-gen on sm_100 and sm_103) through FlashInfer, behind the contract.

`forms`, `sizing` and `support` are integers, `backend` is the step path, `xqa` and `gen` call the library, `launch`
starts our own `kernels`: metadata in one launch, and the rows of a draft step. EXTEND, the KV scatter and the loop's
tree operations are draftmark-cuda-triton's, imported when a backend is opened; FlashInfer when that is on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import CONTRACT_MINOR, BackendInfo, BackendPlugin, Form, Geometry, Mode

from . import forms, sizing, versions
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, TreeOps


class TrtllmPlugin(BackendPlugin):
    """XQA and trtllm-gen. They take lengths from device memory, so no host lengths are needed."""

    info = BackendInfo(
        name="cuda_trtllm",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("flashinfer", "draftmark_cuda_triton", "triton"),
        install=f"pip install 'flashinfer-python=={versions.TESTED[-1]}' draftmark-cuda-triton",
        modes=tuple(Mode),
        forms=(Form.ENGINE_SLOTS,),
        sinks=True,
        summary="TensorRT-LLM's XQA via FlashInfer: trees, drafts with topk > 1; EXTEND: cuda_triton's kernel",
        runs_code_of=("cuda_triton",),
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """On a device this builds and loads every kernel that the geometry can ask for."""
        if forms.uses_gen(geometry):
            from .gen import GenBackend

            return GenBackend(geometry, arena)
        from .backend import XqaBackend

        return XqaBackend(geometry, arena)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """cuda_triton's: tail, verification and compaction in one launch each."""
        from draftmark_cuda_triton.shared import TritonTreeOps

        return TritonTreeOps(geometry)
