"""draftmark's own Triton kernels for NVIDIA GPUs: a speculation tree at the speed of plain attention.

The prefix is read once for all rows of a request and all heads of a group, and the tree's mask is paid for in the
last tiles only. `tiling` and `sizing` are integers, `backend` is the step path, `launch` starts `kernels`. Without a
GPU the same kernels run on CPU tensors in Triton's interpreter, for correctness.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import CONTRACT_MINOR, BackendInfo, BackendPlugin, Form, Geometry, Mode

from . import sizing
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, TreeOps


class TritonPlugin(BackendPlugin):
    """Our own Triton kernels. They decide everything on the device, so no host lengths are needed."""

    info = BackendInfo(
        name="cuda_triton",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=True,
        runtime=("triton",),
        install="pip install 'triton>=3.6'",
        modes=tuple(Mode),
        forms=tuple(Form),
        sinks=True,
        summary="own Triton kernels: prefix once, tail masked, device-built schedule",
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """On CPU tensors the kernels run in Triton's interpreter."""
        from .backend import TritonBackend

        return TritonBackend(geometry, arena)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Tail, verification and compaction in one launch each."""
        from .tree_ops import TritonTreeOps

        return TritonTreeOps(geometry)
