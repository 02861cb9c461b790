"""draftmark over FlashInfer's FA2 kernels: trees as an unmasked prefix and a masked tail.

The prefix is read once for all rows of a request; the mask covers the tail's slots alone, so no buffer grows with rows
times context. `levels`, `partition` and `sizing` are integers, `planning` is what FlashInfer's planner is asked,
`backend` is the step path, `vendor` is every call into FlashInfer, `library` has it count its workspaces itself.
`launch` starts the two Triton kernels of `kernels` that fill index buffers and store new keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import (
    CONTRACT_MINOR,
    BackendInfo,
    BackendPlugin,
    Geometry,
    HostLengthsNeed,
    Requirements,
    available,
    load,
)

from . import sizing
from .support import reasons_against
from .version import INSTALL

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, TreeOps

TREE_OPS_OF = "cuda_triton"
"""The backend whose tree operations this one offers: FlashInfer has none."""


class FlashInferPlugin(BackendPlugin):
    """FlashInfer's FA2 kernels. Its planner runs on the host and takes every length as it is."""

    info = BackendInfo(
        name="cuda_flashinfer",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("flashinfer", "triton"),
        install=INSTALL,
        summary="FlashInfer's FA2 kernels: prefix unmasked, tail masked, merged",
        runs_code_of=(TREE_OPS_OF,),
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def requirements(self, geometry: Geometry) -> Requirements:
        """Exact lengths on the host: the planner partitions the batch by them."""
        return Requirements(host_lengths=HostLengthsNeed.EXACT)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """On a GPU this compiles FlashInfer's modules, unless they are in its cache."""
        from .backend import FlashInferBackend

        return FlashInferBackend(geometry, arena)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """cuda_triton's, one launch each, on a GPU where that backend is installed; None leaves torch's to serve."""
        if device.type != "cuda" or all(row.name != TREE_OPS_OF for row in available()):
            return None
        return load(TREE_OPS_OF).tree_ops(geometry, device)
