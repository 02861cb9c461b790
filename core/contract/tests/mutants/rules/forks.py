"""Mutants that the checks of `forks` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVCache

from ..designs.changes import placed
from ..designs.tutorial import Backend, Plugin
from ..designs.tutorial_plans import Mapped, plugin
from ..mutant import ONLY, Mutant, around, on_batch


def _leaders(batch: ForwardBatch, *facts: torch.Tensor) -> torch.Tensor:
    """Return for each request the first request with equal facts, int64 ``[R]``."""
    equal = torch.stack([one[:, None] == one for one in facts]).all(0)
    return equal.int().argmax(1)


def _table_of_group(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read the pages of requests with one first page and one length from the first of them."""
    leader = _leaders(batch, batch.page_table[:, 0], batch.prefix_lens)
    return replace(batch, page_table=batch.page_table[leader])


def _reads_group_table(backend: Any) -> None:
    """Write KV by each request's own table, and gather the pages of a group of forks once."""
    indices = backend._write_indices

    def write(batch: ForwardBatch, indptr: torch.Tensor) -> None:
        indices(_table_of_group(backend, batch), indptr)

    backend._write_indices = write


class SharedScores(Mapped):
    """Attends once to the prefix pages that neighbours share, with the query rows of the first of them."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention; a request with the prefix pages of its neighbour takes the neighbour's rows."""
        size, asked = self.shape.page_size, q
        if batch.uniform and batch.padded_reqs > 1:
            full = batch.prefix_lens // size
            column = torch.arange(batch.page_table.shape[1], device=q.device)
            same = (batch.page_table[1:] == batch.page_table[:-1]) | (column >= full[1:, None])
            twin = same.all(1) & (full[1:] == full[:-1]) & (full[1:] > 0)
            rows = q.view(batch.padded_reqs, batch.q_lens[0], *q.shape[1:])
            taken = torch.where(twin[:, None, None, None], rows[:-1], rows[1:])
            asked = torch.cat((rows[:1], taken)).view(q.shape)
        super().attend(asked, cache, batch, out)


def _length_of_group(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Take at most the length of the first request with the same first page, as if forks always kept step."""
    leader = _leaders(batch, batch.page_table[:, 0])
    return replace(batch, prefix_lens=torch.minimum(batch.prefix_lens, batch.prefix_lens[leader]))


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
    if batch.uniform:
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
    Mutant("OI1", "Reads forks of equal length through the first one's pages", "shared-prefix attention",
           patch=_reads_group_table, layouts=("csr",), absent="tried in csr"),
    Mutant("OI2", "Attends with the neighbour's queries where the prefix pages are shared", "cascade attention",
           plugin=plugin(SharedScores), layouts=("tutorial",), absent=ONLY),
    Mutant("OI3", "Takes at most the length of the first fork for all forks", "a group keyed on its first page",
           patch=on_batch(_length_of_group, "write_metadata", "attend"), layouts=("cuda_triton",),
           absent="tried in cuda_triton"),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "I01",
        "I02",
        "I02b",
        "I03",
        "I04",
        "I05",
        "OI1",
        "OI2",
        "OI3",
    ),
    "forks.are_requests_of_their_own",
)
