"""Fused attention on Ascend NPUs, a speculation tree as a prefix and a masked tail.

`sizing` and `support` are integers, `lengths` is what the host must know, `metadata` writes the device's half, `ops` is
the only file that names torch_npu's operators, `graph` the only one that names its graphs, `backend` is the step path.
torch_npu is imported when a backend is opened on a device, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import CONTRACT_MINOR, BackendInfo, BackendPlugin, Geometry, HostLengthsNeed, Requirements

from . import sizing
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, GraphState


class AscendPlugin(BackendPlugin):
    """Fused attention and NPU graphs; trees as a prefix and a tail, merged by log-sum-exp."""

    info = BackendInfo(
        name="ascend_npu",
        device="npu",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("torch_npu",),
        install="pip install 'draftmark-ascend-npu[runtime]', in an environment with CANN",
        summary="fused attention and NPU graphs; trees as prefix and tail, merged by log-sum-exp",
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def requirements(self, geometry: Geometry) -> Requirements:
        """Exact lengths on the host, since actual_seq_lengths_kv is a list of the host's; and slots that are unique.

        Page npu_scatter_pa_kv_cache: "values must not repeat".
        """
        return Requirements(HostLengthsNeed.EXACT, unique_slots=True)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Only the metadata runs on CPU tensors."""
        from .backend import AscendBackend

        return AscendBackend(geometry, arena)

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """NPU graphs on an NPU; recorded graphs on the CPU."""
        if device.type == "npu":
            from .graph import NpuGraphState

            return NpuGraphState(device)
        return super().graph_state(geometry, device)
