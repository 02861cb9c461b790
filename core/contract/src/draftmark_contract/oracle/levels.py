"""Decodes one attention pass (level): the KV entries that the level's buffers name for each request, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..layouts import Layout, LengthConvention, Level
from .history import Request
from .problem import DecodeProblem

if TYPE_CHECKING:
    from draftmark.batch import ForwardBatch


class Tokens(NamedTuple):
    """KV slots of consecutive tokens of one request, starting with token `first`."""

    first: int
    slots: list[int]


@dataclass(frozen=True)
class Reading:
    """Holds one level (attention pass) and all inputs for decoding it.

    Attributes:
        level: declaration of the level.
        arena: buffers by name.
        requests: all requests of the batch, padded ones last.
        bases: by request number, the prefix length that the level must use: `pad_fill` for a padded request.
        page_size: tokens per page.
    """

    level: Level
    arena: Mapping[str, Any]
    batch: ForwardBatch
    requests: list[Request]
    bases: dict[int, int]
    page_size: int

    def first(self, n: int) -> int:
        """Return the index of the first token of request n that the level covers."""
        return self.bases[n] if self.level.lengths is LengthConvention.TAIL else 0

    def count(self, n: int) -> int:
        """Return the number of tokens of request n that the level must cover."""
        return self.last(n) - self.first(n)

    def last(self, n: int) -> int:
        """Return the index after the last token of request n that the level covers."""
        return self.bases[n] + (0 if self.level.lengths is LengthConvention.PREFIX else self.requests[n].tail)

    def name(self, role: str) -> str | None:
        """Return the name of the backend's buffer for a role, or None if the role is read from the batch."""
        return self.level.buffers.get(role)

    def head(self, name: str, count: int) -> list[int]:
        """Return the first `count` entries of the buffer `name`."""
        found: list[int] = self.arena[name].flatten()[:count].tolist()
        if len(found) < count:
            raise DecodeProblem(f"{name} is shorter than the batch", len(found), count)
        return found


def read_level(reading: Reading) -> dict[int, Tokens]:
    """Return the KV slots that the attention pass names, for each request in `reading.bases`."""
    _check_lengths(reading)
    if reading.level.layout is Layout.PAGE_TABLE:
        return _by_table(reading)
    return _by_indptr(reading)


def _check_lengths(reading: Reading) -> None:
    name = reading.name("kv_lens")
    if name is None:
        return
    declared = reading.head(name, len(reading.requests))
    for n in reading.bases:
        want = reading.count(n)
        if declared[n] != want:
            prefix = "the prefix" if reading.requests[n].live else "pad_fill"
            convention = reading.level.lengths.value.replace("_", " ").replace("prefix", prefix)
            raise DecodeProblem(f"{name}[{n}] is not {convention}", declared[n], want)


def _by_table(reading: Reading) -> dict[int, Tokens]:
    """Read a level that has a row of page ids per request, from the backend's own table or from the batch's table."""
    name, size = reading.name("page_table"), reading.page_size
    table = (reading.batch.page_table if name is None else reading.arena[name]).tolist()
    found: dict[int, Tokens] = {}
    for n in reading.bases:
        first, last = reading.first(n), reading.last(n)
        row = table[n] if n < len(table) else []
        pages = -(-last // size)
        if pages > len(row):
            raise DecodeProblem(f"the page table is too narrow for token {last - 1} of request {n}", len(row), pages)
        _no_sentinels(name or "batch.page_table", n, row[first // size : pages])
        found[n] = Tokens(first, [row[i // size] * size + i % size for i in range(first, last)])
    return found


def _by_indptr(reading: Reading) -> dict[int, Tokens]:
    """Read a level that has the page ids or token slots of all requests concatenated, with an indptr."""
    indptr = _indptr(reading)
    name = reading.name("kv_indices") or "kv_indices"
    ids = reading.head(name, indptr[-1])
    found: dict[int, Tokens] = {}
    for n in range(len(reading.requests)):
        mine = ids[indptr[n] : indptr[n + 1]]
        if n not in reading.bases:
            if mine:
                raise DecodeProblem(f"padded request {n} is not empty", indptr, "the last live offset, repeated")
            continue
        _no_sentinels(name, n, mine)
        slots = _slots_of_pages(reading, n, mine) if reading.level.layout is Layout.CSR_PAGES else mine
        if len(slots) != reading.count(n):
            what = f"request {n} has the wrong number of KV tokens in {name}"
            raise DecodeProblem(what, f"{len(slots)}, indptr {indptr}", reading.count(n))
        found[n] = Tokens(reading.first(n), slots)
    return found


def _slots_of_pages(reading: Reading, n: int, pages: list[int]) -> list[int]:
    """Return the KV slots of a level's tokens on these pages. The first token may be in the middle of a page."""
    size = reading.page_size
    slots = [page * size + offset for page in pages for offset in range(size)][reading.first(n) % size :]
    name = reading.name("kv_last_page_len")
    if name is None:
        surplus = len(slots) - reading.count(n)
        return slots[: reading.count(n)] if surplus < size else slots
    last = reading.head(name, n + 1)[n]
    low = 1 if pages else 0
    if not low <= last <= size:
        raise DecodeProblem(f"{name}[{n}] is out of range", last, f"{low} … {size}")
    return slots[: len(slots) - size + last] if pages else []


def _indptr(reading: Reading) -> list[int]:
    """Return the indptr up to the captured batch size, after checking that it starts at 0 and never decreases."""
    name = reading.name("kv_indptr")
    if name is None:
        raise DecodeProblem("a CSR level must name its kv_indptr", "none", "Level.buffers['kv_indptr']")
    indptr = reading.head(name, len(reading.requests) + 1)
    if indptr[0] != 0 or any(b < a for a, b in pairwise(indptr)):
        raise DecodeProblem(f"{name} must start at 0 and never decrease, up to the captured size", indptr, "monotone")
    return indptr


def _no_sentinels(name: str, request: int, values: list[int]) -> None:
    if any(value < 0 for value in values):
        raise DecodeProblem(f"a sentinel reached {name} in the entries of request {request}", values, "ids >= 0")
