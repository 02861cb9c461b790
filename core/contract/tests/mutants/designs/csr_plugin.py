"""Plugin and buffer sizes of the CSR backend. Imports neither torch nor the suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark import CONTRACT_MINOR, BackendInfo, BackendPlugin, BufferSpec, Geometry, Mode, maximum

if TYPE_CHECKING:
    from draftmark.runtime import Arena

    from .csr_backend import CsrBackend

MASKED = (Mode.VERIFY, Mode.DRAFT)
"""Modes with a tail mask in `tail_mask`, for chains too. The other modes use a causal mask without a buffer."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Declare index buffers per request, per page and per row."""
    reqs, pages, words = geometry.max_reqs, geometry.max_pages_per_req, geometry.mask_words
    own = [
        BufferSpec("kv_indptr", (reqs + 1,), "int32", "max_reqs + 1"),
        BufferSpec("kv_indices", (reqs * pages,), "int32", "max_reqs · max_pages_per_req"),
        BufferSpec("kv_last_page_len", (reqs,), "int32", "max_reqs"),
        BufferSpec("qo_indptr", (reqs + 1,), "int32", "max_reqs + 1"),
        BufferSpec("slot_mapping", (geometry.max_rows_any,), "int64", "max_rows"),
    ]
    masked = [geometry.max_rows(mode) for mode in geometry.modes if mode in MASKED]
    if masked:
        depth = (reqs, geometry.max_tail)
        own += [
            BufferSpec("tail_mask", (maximum(*masked), words), "int32", "max_rows · mask_words"),
            BufferSpec("tail_depth", depth, "int32", "max_reqs · max_tail"),
        ]
    return own


class CsrPlugin(BackendPlugin):
    """Plugin of the CSR test backend."""

    info = BackendInfo(
        *("csr", "any", CONTRACT_MINOR),
        host_kernels=True,
        sinks=True,
        batch_invariant=True,
        summary="the reference's CSR twin, for tests",
    )
    buffers = staticmethod(buffers)

    def supports(self, geometry: Geometry) -> list[str]:
        """Refuse geometries with more pages than an int32 offset can count."""
        reasons = []
        if geometry.max_reqs * geometry.max_pages_per_req > 2**31 - 1:
            most = "2**31 - 1, the largest offset of kv_indptr: lower either"
            reasons.append(f"max_reqs · max_pages_per_req passes {most}")
        return reasons

    def open_backend(self, geometry: Geometry, arena: Arena) -> CsrBackend:
        """Return a backend that uses this arena."""
        from .csr_backend import CsrBackend

        return CsrBackend(geometry, arena)

    def contract_notes(self) -> object:
        """Return the module with the declarations of the metadata."""
        from . import csr_notes

        return csr_notes
