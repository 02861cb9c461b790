"""The reference backend: attention in plain torch, for any device.

This backend is the default, and the suite's own tests run on it. A vendor can start from a copy: `sizing` declares
the buffers, `backend` fills and reads them, `attention` specifies the attention, and `contract` contains notes for the
conformance suite only.
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
    """Plugin of the reference backend: plain torch on any device."""

    info = BackendInfo(
        name="reference",
        device="any",
        contract_minor=CONTRACT_MINOR,
        host_kernels=True,
        summary="plain torch on any device: for correctness, not for speed",
        modes=tuple(Mode),
        forms=tuple(Form),
        sinks=True,
        batch_invariant=True,
        latent=True,
        narrow_values=True,
        lse=True,
    )

    def supports(self, geometry: Geometry) -> list[str]:
        """Return a reason for fp8 KV; every other geometry is served."""
        if geometry.attention.kv_dtype == "float8_e4m3fn":
            return ["kv_dtype float8_e4m3fn is not served: the reference stores KV as float32, float16 or bfloat16"]
        return []

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Return two index buffers; there is no workspace."""
        return sizing.buffers(geometry)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Return a `ReferenceBackend` bound to `arena`."""
        from .backend import ReferenceBackend

        return ReferenceBackend(geometry, arena)
