"""Attention backend over FlashInfer's kernels. A draft tree runs as a prefix pass without a mask and a tail pass.

The prefix pass reads committed tokens once for all rows of a request. The mask covers only the draft tokens (the
tail), so no buffer grows with rows times context.

* `levels`, `partition` and `sizing` compute with integers only. `planning` makes the arguments of FlashInfer's planner.
* `backend` is the backend, and `vendor` contains every call of FlashInfer.
* `latent` is the backend for latent rows (MLA), over `latent_plan`, `latent_vendor` and `latent_kernels`.
* `launch` starts the two Triton kernels of `kernels`: one fills index buffers, the other stores new keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import (
    CONTRACT_MINOR,
    CORE_MODES,
    BackendInfo,
    BackendPlugin,
    Form,
    Geometry,
    HostLengthsNeed,
    Mode,
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
"""Backend that supplies the tree operations: FlashInfer has none."""


class FlashInferPlugin(BackendPlugin):
    """Plugin of FlashInfer's FA2 kernels. FlashInfer's planner runs on the host and needs exact lengths there."""

    info = BackendInfo(
        name="cuda_flashinfer",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("flashinfer", "triton"),
        install=INSTALL,
        summary="FlashInfer's FA2 and MLA kernels: prefix unmasked, tail masked",
        modes=(*CORE_MODES, Mode.DRAFT_BLOCK),
        forms=(Form.ENGINE_STORES, Form.LATENT_PARTS),
        latent=True,
        lse=True,
        runs_code_of=(TREE_OPS_OF,),
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def requirements(self, geometry: Geometry) -> Requirements:
        """Require exact lengths on the host: the planner partitions the batch by them."""
        return Requirements(host_lengths=HostLengthsNeed.EXACT)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Open the backend; on a GPU this compiles FlashInfer's modules unless they are in its cache."""
        if geometry.attention.latent:
            from .latent import LatentBackend

            return LatentBackend(geometry, arena)
        from .backend import FlashInferBackend

        return FlashInferBackend(geometry, arena)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """Return cuda_triton's tree operations if it is installed and the device is a GPU.

        None selects torch's operations.
        """
        if device.type != "cuda" or all(row.name != TREE_OPS_OF for row in available()):
            return None
        return load(TREE_OPS_OF).tree_ops(geometry, device)
