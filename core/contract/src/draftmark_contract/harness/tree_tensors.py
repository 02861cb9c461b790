"""Rounds of draft trees: what the loop gives `TreeOps`, at fixed addresses."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from draftmark.batch import BatchBuffers, ForwardBatch
from draftmark.cache import KVCache, KVPool
from draftmark.geometry import Geometry, Mode
from draftmark.lengths import Unknown
from draftmark.tree import TreeOps

from ..backend_under_test import BackendUnderTest
from ..cases.trees import verify_tree
from ..oracle.history import Request
from .tensors import raw

LAYERS = 3
KINDS = ("random", "unused", "star", "chain")
JUNK = 10**6
"""What stands behind the live part of a static input: as a slot, a token or a parent it is far out of range."""
TOKENS = (5, 5 + 2**32, 6 + 2**40)
"""Ids are 64-bit; two of these agree in their lower half."""
DIRT = -7


@dataclass
class Round:
    """One batch's trees and choices. Every list has an entry per request, the last one padded.

    Attributes:
        requests: their trees, lengths and pages.
        drafts, targets: token of each node, and the target's after it; drafts are -1 in unused nodes.
    """

    requests: list[Request]
    drafts: list[list[int]]
    targets: list[list[int]]

    def __str__(self) -> str:
        shown = zip(self.requests, self.drafts, self.targets, strict=True)
        return "".join(f"\n    {one} drafts={d} targets={t}" for one, d, t in shown)


def make_round(geometry: Geometry, seed: int, first_page: int = 1) -> Round:
    """Trees of every kind, prefixes from 0 to the wall, pages in random order; paths from the root to all nodes."""
    dice = random.Random(seed)
    reqs, nodes, size = int(geometry.max_reqs), geometry.draft.num_draft_tokens, geometry.attention.page_size
    columns, wall = int(geometry.max_pages_per_req), int(geometry.max_prefix_len)
    ids = dice.sample(range(first_page, first_page + reqs * columns), reqs * columns)
    requests, drafts, targets = [], [], []
    for r in range(reqs):
        live = r < reqs - 1
        prefix = dice.choice((0, 1, size, wall, dice.randrange(wall + 1))) if live else 0
        kind = KINDS[(r + seed) % len(KINDS)] if live else "star"
        parents = verify_tree(kind, nodes, dice.randrange(1000))
        pages = tuple(ids[r * columns : (r + 1) * columns]) if live else (0,) * columns
        requests.append(Request(prefix, pages, parents, nodes, live))
        unused = [j >= 3 for j in range(nodes)] if kind == "unused" else [not live] * nodes
        drafts.append([-1 if unused[j] and j else dice.choice(TOKENS) for j in range(nodes)])
        targets.append([dice.choice(TOKENS) for _ in range(nodes)])
        _agree(requests[-1], drafts[-1], targets[-1], dice.choice((0, nodes - 1, dice.randrange(nodes))))
    return Round(requests, drafts, targets)


def _agree(request: Request, drafts: list[int], targets: list[int], node: int) -> None:
    """The target takes the way to `node`, as far as its nodes are used."""
    for child in request.lineage(node)[:-1]:
        if drafts[child] >= 0:
            targets[request.parents[child]] = drafts[child]


class TreeTensors:
    """Static tensors of rounds, and the pool that they compact.

    Attributes:
        buffers: the batch's own; everything outside a round's part is dirty and must stay as it is.
        drafts, parents: int64, wider and longer than a round, as an engine keeps them.
        targets: int64 ``[R, D]``.
        pool: its pages from `first_page` on may belong to requests, and hold random bytes.

    Args:
        memory: k and v ``[2, layers, first_page + pages, P, heads, head_dim]``, for a pool that KVPool cannot make.
    """

    def __init__(
        self, subject: BackendUnderTest, geometry: Geometry, first_page: int = 1, memory: torch.Tensor | None = None
    ) -> None:
        self.geometry = subject.fit(geometry)
        self.device = torch.device(subject.device)
        reqs, nodes = int(geometry.max_reqs), geometry.draft.num_draft_tokens
        self.buffers = BatchBuffers(self.geometry, self.device)
        self.drafts = torch.full((reqs + 1, nodes + 3), JUNK, dtype=torch.int64, device=self.device)
        self.parents = self.drafts.clone()
        self.targets = torch.zeros(reqs, nodes, dtype=torch.int64, device=self.device)
        self.first_page = first_page
        pages = first_page + reqs * int(geometry.max_pages_per_req) if memory is None else 1
        self.pool = KVPool(self.geometry, LAYERS, pages, 1, self.device)
        if memory is not None:
            self.pool.k, self.pool.v = memory
            self.pool.layers = [KVCache(k, v) for k, v in zip(*memory, strict=True)]

    def batch(self, mode: Mode = Mode.VERIFY, step: int = 0, tree: bool = True) -> ForwardBatch:
        """A batch of all requests over the static buffers; its tail and positions are dirty."""
        reqs = int(self.geometry.max_reqs)
        for tensor in (self.buffers.mask, self.buffers.depth, self.buffers.positions):
            tensor.fill_(DIRT)
        host = Unknown(reqs - 1, int(self.geometry.max_prefix_len))
        return self.buffers.uniform(mode, step, reqs, reqs - 1, host, tree=tree)

    def load(self, one: Round) -> None:
        """Fill the static inputs."""
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
        """Random bytes in every page; NaN among them."""
        dice = torch.Generator().manual_seed(seed)
        for pages in self.owned:
            bits = pages.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=dice))

    def trees(self) -> tuple[torch.Tensor, torch.Tensor]:
        """drafts and parents of a round: slices, so that their rows are not contiguous."""
        reqs, nodes = self.targets.shape
        return self.drafts[:reqs, :nodes], self.parents[:reqs, :nodes]


def open_ops(subject: BackendUnderTest, geometry: Geometry) -> TreeOps:
    """The tree operations that the loop would use with this backend."""
    subject.require(geometry)
    return subject.backend.tree_ops(subject.fit(geometry), torch.device(subject.device))
