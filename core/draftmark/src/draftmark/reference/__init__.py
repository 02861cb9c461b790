"""The reference backend: plain torch on any device, behind the same entry point as everybody else.

It is the default, the backend that the contract suite is tested with, and the text that a vendor copies: `sizing` names
the buffers, `backend` fills and reads them, `attention` is the specification of the attention itself, and `contract` is
what the conformance suite alone reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..buffers import BufferSpec
from ..geometry import Form, Geometry, Mode
from ..hookspecs import BackendInfo
from ..plugin import BackendPlugin
from ..version import CONTRACT_MINOR
from . import sizing

if TYPE_CHECKING:
    from ..arena import Arena
    from ..backend import AttentionBackend

__all__ = ["ReferencePlugin"]


class ReferencePlugin(BackendPlugin):
    """Plain torch on any device."""

    info = BackendInfo(
        name="reference",
        device="any",
        contract_minor=CONTRACT_MINOR,
        host_kernels=True,
        summary="plain torch on any device: the specification, not the speed",
        modes=tuple(Mode),
        forms=tuple(Form),
        sinks=True,
    )

    def supports(self, geometry: Geometry) -> list[str]:
        """Everything but quantised KV."""
        if geometry.attention.kv_dtype == "float8_e4m3fn":
            return ["kv_dtype float8_e4m3fn is not served: the reference stores KV as float32, float16 or bfloat16"]
        return []

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Two index buffers; no workspace."""
        return sizing.buffers(geometry)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Bind to the arena."""
        from .backend import ReferenceBackend

        return ReferenceBackend(geometry, arena)
