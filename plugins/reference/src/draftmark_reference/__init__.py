"""The reference backend: attention in plain torch, for any device.

This backend is the default, and the suite's own tests run on it. A vendor can start from a copy: `sizing` declares
the buffers, `backend` fills and reads them, `attention` specifies the attention, and `contract` contains notes for the
conformance suite only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import (
    CONTRACT_MINOR,
    PLAIN_ROWS,
    ROW_FORMATS,
    BackendInfo,
    BackendPlugin,
    BufferSpec,
    Form,
    Geometry,
    Mode,
    Recurrence,
    StateGeometry,
)

from . import sizing
from .rollback import Rollback

if TYPE_CHECKING:
    from draftmark.runtime import Arena, AttentionBackend, StateBackend

__all__ = ["ReferencePlugin", "Rollback"]


class ReferencePlugin(BackendPlugin):
    """Plugin of the reference backend: plain torch on any device.

    Args:
        rollback: how recurrent layers take rejected rows back.
    """

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
        chosen_keys=True,
        row_formats=ROW_FORMATS,
        recurrences=tuple(Recurrence),
    )

    def __init__(self, rollback: Rollback = Rollback.REPLAY) -> None:
        self.rollback = Rollback(rollback)

    def supports(self, geometry: Geometry) -> list[str]:
        """Return a reason for fp8 KV with one scale; every other geometry is served."""
        a = geometry.attention
        if a.kv_dtype == "float8_e4m3fn" and a.row_format == PLAIN_ROWS:
            return ["kv_dtype float8_e4m3fn is not served: the reference stores KV as float32, float16 or bfloat16"]
        return []

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Return two index buffers; there is no workspace."""
        return sizing.buffers(geometry)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Return a `ReferenceBackend` bound to `arena`."""
        from .backend import ReferenceBackend

        return ReferenceBackend(geometry, arena)

    def state_buffers(self, geometry: StateGeometry) -> list[BufferSpec]:
        """Return the snapshots, or the inputs of each row."""
        if self.rollback is Rollback.SNAPSHOTS:
            return sizing.snapshot_buffers(geometry)
        return sizing.replay_buffers(geometry)

    def open_state(self, geometry: StateGeometry, arena: Arena) -> StateBackend:
        """Return a `SnapshotState` or a `ReplayState` bound to `arena`."""
        from .state import ReplayState, SnapshotState

        return (SnapshotState if self.rollback is Rollback.SNAPSHOTS else ReplayState)(geometry, arena)
