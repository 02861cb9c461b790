"""Attention backend for Ascend NPUs: fused attention, with a draft tree as a prefix and a masked tail (its own rows).

* `sizing`, `support` and `state_support` compute with integers only.
* `backend` is the backend, `latent` the one for latent rows (MLA), and `metadata` writes its device tensors.
* `lengths` has the lengths on the host. `recovery` copies lengths back from the device.
* `rules` and `ops` contain the operators, `graph` the NPU graphs, and `tree_ops` the loop's tree operations.
* `runtime` imports torch_npu. A backend imports it only when it opens on a device.
* `device` and `capability` describe the device and CANN. `switches` has the environment variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import CONTRACT_MINOR, BackendInfo, BackendPlugin, Form, Geometry, HostLengthsNeed, Requirements

from . import sizing
from .state_support import state_reasons
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, GraphState, TreeOps


class AscendPlugin(BackendPlugin):
    """Plugin of fused attention and NPU graphs. Prefix and draft tree run as two calls, merged by log-sum-exp."""

    info = BackendInfo(
        name="ascend_npu",
        device="npu",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("draftmark_ascend_npu.runtime", "torch_npu"),
        install="pip install 'draftmark-ascend-npu[runtime]' --extra-index-url https://download.pytorch.org/whl/cpu, "
        "in an environment with CANN",
        forms=(Form.LATENT_PARTS,),
        latent=True,
        summary="fused attention and NPU graphs; trees as prefix and tail, merged by log-sum-exp",
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)
    state_supports = staticmethod(state_reasons)

    def requirements(self, geometry: Geometry) -> Requirements:
        """Require unique KV slots, and exact lengths on the host, since actual_seq_lengths_kv is a host list.

        With overlap the host has only bounds. Then the backend copies the lengths back from the device.
        The page of npu_scatter_pa_kv_cache states: "values must not repeat".
        """
        lags = geometry.limits.host_lags
        return Requirements(HostLengthsNeed.RECOVERED if lags else HostLengthsNeed.EXACT, unique_slots=True)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Open the backend on a supported NPU or on the CPU. On the CPU it can only write metadata."""
        from .backend import AscendBackend
        from .latent import AscendLatentBackend

        if any(arena[name].device.type == "npu" for name in arena):
            from .device import require_served

            require_served()
        return (AscendLatentBackend if geometry.attention.latent else AscendBackend)(geometry, arena)

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Return NPU graphs on an NPU, and recorded graphs on the CPU."""
        if device.type == "npu":
            from .graph import NpuGraphState

            return NpuGraphState(device)
        return super().graph_state(geometry, device)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Return tree operations without AICPU operators."""
        from .tree_ops import AscendTreeOps

        return AscendTreeOps(geometry, device)
