"""One forward as a token history. Every check builds its batches from these forwards. Does not import torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftmark.geometry import Geometry, Mode

from ..oracle.formulas import pages, rows_and_tail
from ..oracle.history import Request, chain
from .geometries import describe
from .trees import any_masks, beams, verify_tree


@dataclass(frozen=True)
class ForwardCase:
    """One forward: its mode, draft step, requests and pages.

    Attributes:
        name: label for messages.
        requests: live requests, then padded ones.
        causal: True when the new tokens form a chain and the batch has no mask words.
        num_pages: pages that the pool must have. No request owns the last `TRAPS` of them.
        null_pages: pages at the start of the pool for padded requests.
    """

    name: str
    geometry: Geometry
    mode: Mode
    step: int
    requests: tuple[Request, ...]
    causal: bool
    num_pages: int
    null_pages: int

    @property
    def live(self) -> int:
        """Number of live requests."""
        return sum(one.live for one in self.requests)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(request, row) of each query row of the batch, in order."""
        return [(n, row) for n, one in enumerate(self.requests) for row in range(one.rows)]

    @property
    def live_rows(self) -> int:
        """Number of query rows of live requests. These rows come first."""
        return sum(one.rows for one in self.requests if one.live)

    def at_step(self, step: int) -> ForwardCase:
        """Return an earlier step of this draft round: the same requests and pages with fewer new tokens."""
        k = self.geometry.draft.topk
        cut = tuple(replace(one, parents=one.parents[: k * (step + 1)]) for one in self.requests)
        return replace(self, step=step, requests=cut)

    def sharing_prefix(self) -> ForwardCase:
        """Return the forward with the first page of request 0 also in the table of request 1, as in a prefix cache."""
        first, second, *rest = self.requests
        shared = replace(second, pages=(first.pages[0], *second.pages[1:]))
        return replace(self, name=f"{self.name}-shared", requests=(first, shared, *rest))

    def moved_but_first(self) -> ForwardCase:
        """Return the forward with the pages of each live request reordered, except the first page.

        A preempted request looks like this: it found its first page in the prefix cache when it came back.
        """
        moved = tuple(
            replace(one, pages=(one.pages[0], *one.pages[:0:-1])) if one.live and one.pages else one
            for one in self.requests
        )
        return replace(self, name=f"{self.name}-moved", requests=moved)

    def with_common_pages(self, count: int) -> ForwardCase:
        """Return the forward with the first `count` pages of request 0 at the start of every live request's table.

        A common system prompt looks like this. A request with a shorter prefix shares fewer pages. Pages with new
        tokens are never shared.
        """
        first, size = self.requests[0], self.geometry.attention.page_size

        def shared(one: Request) -> Request:
            most = min(count, one.prefix // size, len(first.pages), first.prefix // size) if one.live else 0
            return replace(one, pages=(*first.pages[:most], *one.pages[most:]))

        return replace(self, name=f"{self.name}-common", requests=tuple(map(shared, self.requests)))

    def with_null_pages(self, count: int) -> ForwardCase:
        """Return the forward in a pool that starts with `count` null pages."""
        shift, size = count - self.null_pages, self.geometry.attention.page_size
        moved = tuple(
            replace(one, pages=tuple(p + shift for p in one.pages) if one.live else _null(n, one, size, count))
            for n, one in enumerate(self.requests)
        )
        return replace(self, requests=moved, num_pages=self.num_pages + shift, null_pages=count)

    def __str__(self) -> str:
        head = f"{self.name}: {self.mode.value} step {self.step}, {self.live} live of {len(self.requests)}"
        lines = [head, describe(self.geometry), *(f"r{n}: {one}" for n, one in enumerate(self.requests))]
        return "\n      ".join(lines)


TRAPS = 3
"""Pages at the end of the pool that no request owns. They contain NaN and fill the unused page-table entries."""


def uniform(
    name: str,
    geometry: Geometry,
    mode: Mode,
    prefixes: Sequence[int],
    padded: int,
    *,
    step: int = 0,
    tree: str = "random",
    seed: int = 0,
    first_page: int = 0,
) -> ForwardCase:
    """Return a forward in which every request has the row count of `mode`. Padded requests fill it up to `padded`.

    Args:
        tree: for VERIFY a kind of `verify_tree`, or ``"masks"``, where rows see slots that are not their ancestors.
    """
    rows, tail = rows_and_tail(geometry, mode, step)
    single = mode is Mode.DRAFT and geometry.draft.topk == 1
    causal = tree == "chain" or single or mode in (Mode.DECODE, Mode.DRAFT_EXTEND)
    requests = []
    for n, prefix in enumerate(prefixes):
        branches = beams(geometry.draft.topk, step, seed + n) if mode is Mode.DRAFT else ()
        parents = chain(tail) if causal else branches or verify_tree(tree, rows, seed + n)
        masks = any_masks(rows, seed + n) if tree == "masks" and mode is Mode.VERIFY else ()
        requests.append(Request(prefix, (), parents, rows, masks=masks))
    requests += [Request(0, (), chain(tail), rows, live=False)] * (padded - len(prefixes))
    return _with_pages(name, geometry, mode, step, requests, causal, seed, first_page)


def ragged(
    name: str,
    geometry: Geometry,
    prefixes: Sequence[int],
    rows: Sequence[int],
    *,
    padded: int = 0,
    seed: int = 0,
    first_page: int = 0,
) -> ForwardCase:
    """Return an EXTEND in which request n has rows[n] new tokens after its prefix. Padded requests have no rows."""
    requests = [Request(prefix, (), chain(n), n) for prefix, n in zip(prefixes, rows, strict=True)]
    requests += [Request(0, (), (), 0, live=False)] * padded
    return _with_pages(name, geometry, Mode.EXTEND, 0, requests, True, seed, first_page)


def _with_pages(
    name: str,
    geometry: Geometry,
    mode: Mode,
    step: int,
    requests: list[Request],
    causal: bool,
    seed: int,
    first_page: int,
) -> ForwardCase:
    """Assign shuffled page ids: each live request gets its own pages, and each padded request gets null page 0."""
    size = geometry.attention.page_size
    needs = [pages(one.prefix + one.tail, size) if one.live else 0 for one in requests]
    start = max(1, first_page)
    ids = list(range(start, start + sum(needs)))
    random.Random(f"pages {seed}").shuffle(ids)
    placed = []
    for n, (one, need) in enumerate(zip(requests, needs, strict=True)):
        mine = tuple(ids.pop() for _ in range(need))
        placed.append(replace(one, pages=mine if one.live else _null(n, one, size, 1)))
    last = start + sum(needs) + TRAPS
    return ForwardCase(name, geometry, mode, step, tuple(placed), causal, last, 1)


def _null(n: int, request: Request, page_size: int, null_pages: int) -> tuple[int, ...]:
    """Return the null pages of a padded request: page 0, or separate null pages if the backend needs unique slots."""
    need: int = max(1, pages(request.tail, page_size))
    if null_pages == 1:
        return (0,) * need
    return tuple((n * need + i) % null_pages for i in range(need))
