"""Contents of `draftmark size`: a geometry's lengths, the backend's buffers, the core's tensors and the KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from draftmark.batch_tensors import batch_tensors
from draftmark.buffers import BufferSpec
from draftmark.geometry import Geometry
from draftmark.loaded import LoadedBackend

LENGTHS = {
    "max_tail": "max(1, D, k·(S−1))",
    "max_prefix_len": "C, + max_tail with overlap",
    "max_kv_len": "max_prefix_len + max_tail",
    "max_pages_per_req": "ceil(max_kv_len / P)",
    "max_reqs": "max(max_num_reqs, capture_batch_sizes)",
    "max_rows_any": "max query rows of a forward, over the modes",
    "mask_words": "ceil(max_tail / 32)",
}
"""Properties of `Geometry` that determine sizes, each with its formula."""


@dataclass(frozen=True)
class Pages:
    """KV pages of one layer, enough for every request at its longest context.

    Attributes:
        page_bytes: bytes of K and V of one page.
        pages: number of pages, null pages included.
        null_pages: number of null pages.
    """

    page_bytes: int
    pages: int
    null_pages: int
    formula: str = "null_pages + max_num_reqs · max_pages_per_req"

    @property
    def bytes(self) -> int:
        """Bytes of the page pool of one layer."""
        return self.page_bytes * self.pages


@dataclass(frozen=True)
class Sizing:
    """Memory that a backend and the core allocate for one geometry."""

    lengths: dict[str, int]
    buffers: list[BufferSpec]
    batch: list[BufferSpec]
    pages: Pages

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the backend's arena."""
        return sum(spec.nbytes for spec in self.buffers)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the core's static batch tensors; one set per engine, for any number of backends."""
        return sum(spec.nbytes for spec in self.batch)


def sizing(backend: LoadedBackend, geometry: Geometry) -> Sizing:
    """Return the memory that `geometry` needs on `backend`.

    Raises:
        BackendRefusal: the backend does not serve `geometry`.
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
