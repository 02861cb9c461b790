"""What `draftmark size` says: a geometry's lengths, a backend's buffers, and what the core keeps beside them."""

from __future__ import annotations

from dataclasses import dataclass

from ..batch_tensors import batch_tensors
from ..buffers import BufferSpec
from ..geometry import Geometry
from ..loaded import LoadedBackend

LENGTHS = {
    "max_tail": "max(1, D, k·(S−1))",
    "max_prefix_len": "C, + max_tail with overlap",
    "max_kv_len": "max_prefix_len + max_tail",
    "max_pages_per_req": "ceil(max_kv_len / P)",
    "max_reqs": "max(max_num_reqs, capture_batch_sizes)",
    "max_rows_any": "most query rows of a forward, over the modes",
    "mask_words": "ceil(max_tail / 32)",
}
"""Properties of `Geometry` that decide sizes, with their formulas for readers."""


@dataclass(frozen=True)
class Pages:
    """KV pages of one layer, when every request may fill its context.

    Attributes:
        page_bytes: K and V of one page.
        pages: null pages included.
    """

    page_bytes: int
    pages: int
    null_pages: int
    formula: str = "null_pages + max_num_reqs · max_pages_per_req"

    @property
    def bytes(self) -> int:
        """Bytes of the pool, one layer."""
        return self.page_bytes * self.pages


@dataclass(frozen=True)
class Sizing:
    """Everything that one geometry makes a backend and the core allocate."""

    lengths: dict[str, int]
    buffers: list[BufferSpec]
    batch: list[BufferSpec]
    pages: Pages

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the backend's own buffers: its arena."""
        return sum(spec.nbytes for spec in self.buffers)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the core's static batch tensors; one set per engine, whatever the number of backends."""
        return sum(spec.nbytes for spec in self.batch)


def sizing(backend: LoadedBackend, geometry: Geometry) -> Sizing:
    """Size `geometry` on `backend`.

    Raises:
        BackendRefusal: the backend does not serve it.
    """
    backend.require(geometry)
    null_pages = geometry.null_pages(backend.requirements(geometry).unique_slots)
    pages = null_pages + geometry.limits.max_num_reqs * geometry.max_pages_per_req
    return Sizing(
        {name: getattr(geometry, name) for name in LENGTHS},
        backend.buffers(geometry),
        batch_tensors(geometry),
        Pages(geometry.page_bytes, pages, null_pages),
    )
