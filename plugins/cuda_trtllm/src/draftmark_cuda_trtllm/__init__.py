"""Attention backend over TensorRT-LLM's decode kernels: XQA, and trtllm-gen on sm_100 and sm_103, through FlashInfer.

* `forms`, `sizing` and `support` compute with integers only; they import neither torch nor FlashInfer.
* `backend` contains the XQA backend, `gen` and `gen_latent` the trtllm-gen backends. `xqa` calls FlashInfer. `launch`
  starts the plugin's own Triton `kernels`.
* draftmark-cuda-triton supplies EXTEND, the KV store and the loop's tree operations. It is imported when a backend
  opens. FlashInfer is imported when a backend opens on a GPU.
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
    """Plugin of XQA and trtllm-gen. Their kernels read lengths from device memory, so no host lengths are needed."""

    info = BackendInfo(
        name="cuda_trtllm",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("flashinfer", "draftmark_cuda_triton", "triton"),
        install=f"pip install '{versions.DISTRIBUTION}{versions.RANGE}' draftmark-cuda-triton",
        modes=tuple(Mode),
        forms=(Form.ENGINE_SLOTS,),
        sinks=True,
        latent=True,
        summary="TensorRT-LLM's XQA via FlashInfer: trees, drafts with topk > 1; EXTEND: cuda_triton's kernel",
        runs_code_of=("cuda_triton",),
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Open the backend of this GPU. On a GPU this builds and loads every kernel that the geometry can launch."""
        if geometry.attention.latent:
            from .gen_latent import GenLatentBackend

            return GenLatentBackend(geometry, arena)
        if forms.uses_gen(geometry):
            from .gen import GenBackend

            return GenBackend(geometry, arena)
        from .backend import XqaBackend

        return XqaBackend(geometry, arena)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Return cuda_triton's operations on draft trees: write a tree, verify it, move accepted KV.

        Each operation is one launch.
        """
        from draftmark_cuda_triton.shared import TritonTreeOps

        return TritonTreeOps(geometry)
