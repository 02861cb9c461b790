"""Mutants I01 … I05: requests that share prefix pages are taken for one request, or for requests with one prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry
from draftmark.batch import ForwardBatch
from draftmark.cache import KVCache

from .boundaries import placed
from .mutant import Mutant, around, on_batch
from .tutorial import Backend, Plugin

Tensor = torch.Tensor
ONE_PART = {"layouts": ("reference",), "absent": "attend reads no page table; I02b changes the page lists"}


def _first_alike(batch: ForwardBatch) -> Tensor:
    """Return for each request the first request with its first page and its prefix length, int64 ``[R]``."""
    page, length = batch.page_table[:, 0], batch.prefix_lens
    alike = (page[:, None] == page) & (length[:, None] == length) & (length > 0)
    own = torch.arange(len(page), device=page.device)
    return torch.where(alike.any(1), alike.int().argmax(1), own)


def _of_the_first(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read the pages of the first request that begins with the same page and has the same length."""
    return replace(batch, page_table=batch.page_table[_first_alike(batch)])


def _once(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
    """Attend for the first request of each group of forks, and copy its output to the others."""
    original(q, cache, batch, out)
    if batch.uniform is not None:
        by_request = out.view(batch.padded_reqs, -1, *out.shape[1:])
        by_request.copy_(by_request[_first_alike(batch)])


def _stored_once(backend: Any, batch: ForwardBatch, request: Tensor, position: Tensor) -> Tensor:
    """Store the rows of every fork in the first fork's pages."""
    size = backend.geometry.attention.page_size
    page = batch.page_table[_first_alike(batch)[request], position // size].long()
    return page * size + position % size


def _common_to_all(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Take the pages that the first two requests share for a prefix of every request, as a cascade kernel does."""
    table = batch.page_table
    if len(table) < 2 or batch.num_reqs < 3:
        return batch
    shared = (table[0] == table[1]).int().cumprod(0).bool()
    within = torch.arange(table.shape[1]) < (batch.prefix_lens // backend.geometry.attention.page_size)[:, None]
    return replace(batch, page_table=torch.where(shared & within, table[0], table))


class _Gathered(Backend):
    """Gathers KV once for each first page and length."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        """Attend over the first fork's pages."""
        super().attend(q, cache, _of_the_first(self, batch), out)


class _GatheredPlugin(Plugin):
    def open_backend(self, geometry: Geometry, arena: Any) -> Backend:
        return _Gathered(geometry, arena)


def _page_lists(backend: Any) -> None:
    """Write the page list of the first fork for every fork."""
    around(backend, "_write_indices", lambda original, batch, indptr: original(_of_the_first(backend, batch), indptr))


MUTANTS = (
    Mutant("I01", "Attends once for requests with one first page and one length", "prefix-aware batching",
           patch=lambda backend: around(backend, "attend", _once)),
    Mutant("I02", "Reads the pages of the first request that begins with the same page and has the same length",
           "a cache of gathered pages", patch=on_batch(_of_the_first, "attend"), **ONE_PART),
    Mutant("I02b", "Writes one page list for requests with one first page and one length", "a cache of page lists",
           patch=_page_lists, layouts=("csr",), absent="it has no page lists; I02 changes attend"),
    Mutant("I03", "Stores the rows of forks of one length in the first fork's pages", "a cache of slots",
           patch=placed(_stored_once)),
    Mutant("I04", "Takes the pages that two requests share for a prefix of all requests", "cascade attention",
           patch=on_batch(_common_to_all, "attend"), **ONE_PART),
    Mutant("I05", "Gathers KV once for each first page and length", "a cache of gathered pages",
           layouts=("tutorial",), absent="a subclass of the tutorial's backend", plugin=_GatheredPlugin),
)  # fmt: skip

KILLER = dict.fromkeys((one.id for one in MUTANTS), "forks.are_requests_of_their_own")
"""Check that must kill each mutant."""
