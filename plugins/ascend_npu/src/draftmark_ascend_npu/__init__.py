"""Fused attention on Ascend NPUs, a speculation tree as a prefix and a masked tail.

`sizing` and `support` are integers, `lengths` is what the host must know and `recovery` how the device tells it,
`metadata` writes the device's half, `rules` and `ops` are the operators, which nobody else names, `graph` the only file
that names graphs, `tree_ops` the loop's, `backend` is the step path. `runtime` imports torch_npu when a backend is
opened on a device, never before; `device` and `capability` say what is there, `switches` what may be changed from
outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import CONTRACT_MINOR, BackendInfo, BackendPlugin, Geometry, HostLengthsNeed, Requirements

from . import sizing
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, GraphState, TreeOps


class AscendPlugin(BackendPlugin):
    """Fused attention and NPU graphs; trees as a prefix and a tail, merged by log-sum-exp."""

    info = BackendInfo(
        name="ascend_npu",
        device="npu",
        contract_minor=CONTRACT_MINOR,
        host_kernels=False,
        runtime=("draftmark_ascend_npu.runtime", "torch_npu"),
        install="pip install 'draftmark-ascend-npu[runtime]' --extra-index-url https://download.pytorch.org/whl/cpu, "
        "in an environment with CANN",
        summary="fused attention and NPU graphs; trees as prefix and tail, merged by log-sum-exp",
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def requirements(self, geometry: Geometry) -> Requirements:
        """Exact lengths, since actual_seq_lengths_kv is a list of the host's; and slots that are unique.

        Where the host lags, the device says what they are. Page npu_scatter_pa_kv_cache: "values must not repeat".
        """
        lags = geometry.limits.host_lags
        return Requirements(HostLengthsNeed.RECOVERED if lags else HostLengthsNeed.EXACT, unique_slots=True)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """On an NPU that the rules are for; only the metadata runs on CPU tensors."""
        from .backend import AscendBackend

        if any(arena[name].device.type == "npu" for name in arena):
            from .device import require_served

            require_served()
        return AscendBackend(geometry, arena)

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """NPU graphs on an NPU; recorded graphs on the CPU."""
        if device.type == "npu":
            from .graph import NpuGraphState

            return NpuGraphState(device)
        return super().graph_state(geometry, device)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Tree operations without AICPU operators."""
        from .tree_ops import AscendTreeOps

        return AscendTreeOps(geometry, device)
