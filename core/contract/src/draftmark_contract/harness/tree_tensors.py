"""Static tensors of a round of draft trees, at fixed addresses, and the KV pool that the round compacts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmark.batch import BatchBuffers, ForwardBatch
from draftmark.cache import KVCache, KVPool
from draftmark.geometry import Geometry, Mode
from draftmark.lengths import Unknown

from ..cases.tree_rounds import Round
from ..oracle.formulas import max_pages, max_prefix, max_requests
from ..oracle.history import Request
from .pools import raw

LAYERS = 3
JUNK = 10**6
"""Filler of the unused part of a static input: far out of range as a slot, a token or a parent."""
DIRT = -7


class TreeTensors:
    """Holds the static tensors of draft-tree rounds, and the KV pool that `compact` changes.

    Attributes:
        buffers: the batch's static buffers. Elements that a round does not use must stay unchanged.
        drafts, parents: int64, wider and longer than a round needs, as in an engine. Their two widths differ.
        targets: int64 ``[R, D]``.
        pool: KV pool. Requests may own its pages from `first_page` on, which contain random bytes.

    Args:
        first_page: first page that requests may own.
        memory: k and v ``[2, layers, first_page + pages, P, heads, head_dim]``, for a layout that KVPool cannot
            allocate; None allocates a KVPool.
        group: geometry of the pool's layers, if it differs from `geometry`: another layer group with other KV heads.
        layers: number of layers of the pool.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: str,
        first_page: int = 1,
        memory: torch.Tensor | None = None,
        group: Geometry | None = None,
        layers: int = LAYERS,
    ) -> None:
        self.geometry, self.device = geometry, torch.device(device)
        self.reqs, nodes = max_requests(geometry), geometry.draft.num_draft_tokens
        self.buffers = BatchBuffers(self.geometry, self.device)
        self.drafts = torch.full((self.reqs + 1, nodes + 3), JUNK, dtype=torch.int64, device=self.device)
        self.parents = torch.full((self.reqs + 2, nodes + 8), JUNK, dtype=torch.int64, device=self.device)
        self.targets = torch.zeros(self.reqs, nodes, dtype=torch.int64, device=self.device)
        self.first_page = first_page
        pages = first_page + self.reqs * max_pages(geometry) if memory is None else 1
        self.pool = KVPool(group or geometry, layers, pages, 1, self.device)
        if memory is not None:
            self.pool.k, self.pool.v = memory
            self.pool.layers = [KVCache(k, v) for k, v in zip(*memory, strict=True)]

    def batch(self, mode: Mode = Mode.VERIFY, step: int = 0, tree: bool = True) -> ForwardBatch:
        """Return a batch of all requests over the static buffers. Its mask, depths and positions hold stale values."""
        for tensor in (self.buffers.mask, self.buffers.depth, self.buffers.positions):
            tensor.fill_(DIRT)
        host = Unknown(self.reqs - 1, max_prefix(self.geometry))
        return self.buffers.uniform(mode, step, self.reqs, self.reqs - 1, host, tree=tree)

    def load(self, one: Round) -> None:
        """Copy the inputs of a round into the static tensors."""
        reqs, nodes = self.targets.shape
        self.buffers.prefix_lens.copy_(torch.tensor([r.prefix for r in one.requests], dtype=torch.int32))
        self.buffers.page_table.copy_(torch.tensor([r.pages for r in one.requests], dtype=torch.int32))
        self.drafts[:reqs, :nodes].copy_(torch.tensor(one.drafts))
        self.parents[:reqs, :nodes].copy_(torch.tensor([r.parents for r in one.requests]))
        self.targets.copy_(torch.tensor(one.targets))

    @property
    def owned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the pages that requests may own, as integers ``[layers, pages, P, …]``."""
        return raw(self.pool.k)[:, self.first_page :], raw(self.pool.v)[:, self.first_page :]

    def scramble(self, seed: int) -> None:
        """Fill every page with random bytes, which include NaN."""
        dice = torch.Generator().manual_seed(seed)
        for pages in self.owned:
            bits = pages.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=dice))

    def trees(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return drafts and parents of a round as slices, so that their rows are not contiguous."""
        reqs, nodes = self.targets.shape
        return self.drafts[:reqs, :nodes], self.parents[:reqs, :nodes]

    def parents_of(self, requests: Sequence[Request]) -> torch.Tensor:
        """Return the parents of these requests' new tokens, int64 ``[R, T]``, as a slice of a wider tensor."""
        tail = requests[0].tail
        wide = torch.full((len(requests), tail + 5), JUNK, dtype=torch.int64, device=self.device)
        wide[:, :tail].copy_(torch.tensor([request.parents for request in requests]))
        return wide[:, :tail]
