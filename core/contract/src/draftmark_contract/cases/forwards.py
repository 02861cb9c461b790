"""One forward as a token history. Every check builds its batches from these forwards. Does not import torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from draftmark.geometry import CORE_MODES, Form, Geometry, Mode, StateGeometry

from ..oracle.chosen import Lists, choose, restricted
from ..oracle.formulas import max_budget, max_requests, page_size_of, pages, rows_and_tail
from ..oracle.history import Request, chain
from ..oracle.truth import Row, Truth, enumerate_truth
from .geometries import describe
from .trees import any_masks, beams, verify_tree


@dataclass(frozen=True)
class ForwardCase:
    """One forward: its mode, draft step, requests and pages.

    In a layer with recurrent state a page is a slot, and each request has one.

    Attributes:
        name: label for messages.
        requests: live requests, then padded ones.
        causal: True when the new tokens form a chain and the batch has no mask words.
        num_pages: pages that the pool must have. No request owns the last `TRAPS` of them.
        null_pages: pages at the start of the pool for padded requests.
        budget: query rows of a RAGGED_VERIFY batch. Rows after the requests' rows are padding. 0 in other modes.
        bounds: the host's upper bound of each request's rows in RAGGED_VERIFY; () means D for each.
        unstored: rows that the engine passes with slot -1, because it already has their KV.
        shares_kv: True for a layer that reads another layer's KV: the engine calls attend without write_kv.
        draw: number that decides the lists of a layer with chosen keys; see `oracle.chosen.choose`.
        attends: False for a forward that only stores rows: the engine calls write_kv without attend.
        causal_block: True for a DRAFT_BLOCK with a causal tail.
    """

    name: str
    geometry: Geometry
    mode: Mode
    step: int
    requests: tuple[Request, ...]
    causal: bool
    num_pages: int
    null_pages: int
    budget: int = 0
    bounds: tuple[int, ...] = ()
    unstored: frozenset[Row] = frozenset()
    shares_kv: bool = False
    attends: bool = True
    causal_block: bool = False
    draw: int = 0

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

    @property
    def num_rows(self) -> int:
        """Number of query rows of the batch, padding rows included."""
        return self.budget or len(self.rows)

    @property
    def truth(self) -> Truth:
        """KV slots that each row reads and writes. Rows that the engine does not store are included."""
        a = self.geometry.attention
        every = _truth(self.requests, a.page_size, a.window_left)
        return restricted(every, self.lists) if a.chosen_width else every

    @property
    def lists(self) -> Lists:
        """Entries of each row's list, in a layer with chosen keys."""
        a = self.geometry.attention
        return _lists(self.requests, a.page_size, a.chosen_width, self.draw)

    @property
    def kept(self) -> frozenset[Row]:
        """Live rows that this forward does not store. Their KV is in the cache before it."""
        return self.unstored if self.is_stored else frozenset(self.rows[: self.live_rows])

    @property
    def is_stored(self) -> bool:
        """True if the backend stores the rows: the engine calls write_kv, unless it stores or shares the KV itself."""
        return not self.shares_kv and Form.ENGINE_STORES not in self.geometry.forms

    @property
    def stores_padding(self) -> bool:
        """True if rows of padded requests are stored, in null pages."""
        own_slots = Form.ENGINE_SLOTS in self.geometry.forms
        return self.is_stored and not (own_slots or self.mode is Mode.RAGGED_VERIFY)

    @property
    def declared(self) -> bool:
        """True if a plugin's `MetadataSpec` describes the metadata: a core mode, with no form except LATENT_PARTS.

        Lists of chosen keys are no metadata: a backend reads them in `attend`.
        """
        forms, lists = set(self.geometry.forms), self.geometry.attention.chosen_width
        return self.mode in CORE_MODES and forms <= {Form.LATENT_PARTS} and not lists

    @property
    def slots(self) -> dict[Row, int]:
        """KV slot that an engine passes for each row, in order: the row's own slot, or -1 when it is not stored."""
        writes, requests = self.truth.writes, self.requests
        return {row: writes[row] if requests[row[0]].live and row not in self.unstored else -1 for row in self.rows}

    def at_step(self, step: int) -> ForwardCase:
        """Return an earlier step of this draft round: the same requests and pages with fewer new tokens.

        Every step of a round stores its rows, because later steps read them.
        """
        k = self.geometry.draft.topk
        cut = tuple(replace(one, parents=one.parents[: k * (step + 1)]) for one in self.requests)
        return replace(self, step=step, requests=cut, unstored=frozenset(), shares_kv=False)

    def with_causal_block(self) -> ForwardCase:
        """Return a DRAFT_BLOCK forward with a causal tail, in which no row sees a later one."""
        return replace(self, causal_block=True, requests=tuple(replace(one, masks=()) for one in self.requests))

    def with_chains(self) -> ForwardCase:
        """Return the forward with a chain in place of each request's draft tree, and a causal tail."""
        requests = tuple(replace(one, parents=chain(one.tail), masks=()) for one in self.requests)
        return replace(self, causal=True, requests=requests)

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
        shared = self.forked([range(self.live)], count)
        return replace(shared, name=f"{self.name}-common")

    def forked(self, groups: Sequence[Sequence[int]], most: int = 2**31) -> ForwardCase:
        """Return the forward with requests that are forks: n samples of one prompt, or answers that were branched.

        The requests of a group share their full prefix pages with the group's first request, as far as the shorter
        prefix reaches. The page with the end of a prefix, and pages with new tokens, are each request's own.

        Args:
            groups: indices of live requests.
            most: largest number of pages that two requests share.
        """
        requests, size = list(self.requests), self.geometry.attention.page_size
        for first, *others in groups:
            source = requests[first]
            for other in others:
                one = requests[other]
                shared = min(most, one.prefix // size, source.prefix // size)
                requests[other] = replace(one, pages=(*source.pages[:shared], *one.pages[shared:]))
        return replace(self, name=f"{self.name}-forked", requests=tuple(requests))

    def with_returned_pages(self, holds: str, seed: int = 0) -> ForwardCase:
        """Return the forward after every live request gave back its pages left of the window, as engines do.

        Args:
            holds: what the columns name now: ``"null"``, the null page; ``"nan"``, pages of NaN; ``"written"``, a page
                that another request writes to in this forward; ``"mixed"``, one of these for each column.
        """
        dice = random.Random(f"returned {holds} {seed}")
        owners, last = [one for one in self.requests if one.live and one.pages], self.num_pages - 1
        pages_of: dict[str, Callable[[int], int]] = {
            "null": lambda n: 0,
            "nan": lambda n: last - dice.randrange(TRAPS),
            "written": lambda n: owners[(n + 1) % len(owners)].pages[-1],
        }

        def after(n: int, one: Request) -> Request:
            count = hidden_pages(one, self.geometry) if one.live else 0
            kinds = [dice.choice(list(pages_of)) if holds == "mixed" else holds for _ in range(count)]
            return replace(one, pages=(*(pages_of[kind](n) for kind in kinds), *one.pages[count:]), returned=count)

        requests = tuple(after(n, one) for n, one in enumerate(self.requests))
        return replace(self, name=f"{self.name}-{holds}", requests=requests)

    def with_null_pages(self, count: int) -> ForwardCase:
        """Return the forward in a pool that starts with `count` null pages."""
        shift, size = count - self.null_pages, page_size_of(self.geometry)
        moved = tuple(
            replace(
                one,
                pages=tuple(p + shift for p in one.pages) if one.live else _null(n, one, size, count),
                save=one.save + shift if one.save else 0,
            )
            for n, one in enumerate(self.requests)
        )
        return replace(self, requests=moved, num_pages=self.num_pages + shift, null_pages=count)

    def __str__(self) -> str:
        head = f"{self.name}: {self.mode.value} step {self.step}, {self.live} live of {len(self.requests)}"
        more = {"budget": self.budget, "bounds": self.bounds, "not stored": sorted(self.unstored)}
        said = [f"{name} {value}" for name, value in more.items() if value] + ["without write_kv"] * self.shares_kv
        said += ["without attend"] * (not self.attends) + ["causal block"] * self.causal_block
        lines = [head, describe(self.geometry), *(f"r{n}: {one}" for n, one in enumerate(self.requests))]
        lines += [", ".join(said)] if said else []
        return "\n      ".join(lines)


def hidden_pages(request: Request, geometry: Geometry) -> int:
    """Return the number of a request's pages that lie left of the window of every row: before position L - window."""
    a = geometry.attention
    return max(0, request.prefix - a.window_left) // a.page_size if a.window_left >= 0 else 0


TRAPS = 3
"""Pages at the end of the pool that no request owns. They contain NaN and fill the unused page-table entries."""


def uniform(
    name: str,
    geometry: Geometry | StateGeometry,
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
    causal = tree == "chain" or single or mode in (Mode.DECODE, Mode.DRAFT_EXTEND, Mode.DRAFT_BLOCK)
    requests = []
    for n, prefix in enumerate(prefixes):
        branches = beams(geometry.draft.topk, step, seed + n) if mode is Mode.DRAFT else ()
        parents = chain(tail) if causal else branches or verify_tree(tree, rows, seed + n)
        masks = any_masks(rows, seed + n) if tree == "masks" and mode is Mode.VERIFY else block_masks(mode, tail)
        requests.append(Request(prefix, (), parents, rows, masks=masks))
    requests += [Request(0, (), chain(tail), rows, live=False)] * (padded - len(prefixes))
    return with_pages(name, geometry, mode, step, requests, causal, seed, first_page)


def ragged(
    name: str,
    geometry: Geometry | StateGeometry,
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
    return with_pages(name, geometry, Mode.EXTEND, 0, requests, True, seed, first_page)


def device_rows(
    name: str,
    geometry: Geometry | StateGeometry,
    prefixes: Sequence[int],
    rows: Sequence[int],
    budget: int,
    *,
    tree: str = "random",
    padded: int | None = None,
    seed: int = 0,
    first_page: int = 0,
) -> ForwardCase:
    """Return a RAGGED_VERIFY in which request n has rows[n] new tokens, each with a row, in a batch of `budget` rows.

    Args:
        tree: kind of `verify_tree`; ``"chain"`` for a batch without mask words.
        padded: requests of the batch; by default the number that its graph has room for.
    """
    room = min(max_requests(geometry), budget) if padded is None else padded
    counts = enumerate(zip(prefixes, rows, strict=True))
    requests = [Request(prefix, (), device_tree(tree, q, seed + n), q) for n, (prefix, q) in counts]
    requests += [Request(0, (), (), 0, live=False)] * (room - len(requests))
    made = with_pages(name, geometry, Mode.RAGGED_VERIFY, 0, requests, tree == "chain", seed, first_page)
    return replace(made, budget=budget)


def of_mode(
    name: str,
    geometry: Geometry | StateGeometry,
    mode: Mode,
    prefixes: Sequence[int],
    rows: Sequence[int],
    padded: int,
    *,
    step: int = 0,
    seed: int = 0,
    first_page: int = 0,
) -> ForwardCase:
    """Return a forward of any mode on its largest budget: chains if topk is 1, else trees.

    Args:
        rows: new tokens of each request, in EXTEND and RAGGED_VERIFY only.
    """
    tree = "chain" if geometry.draft.topk == 1 else "random"
    if mode is Mode.EXTEND:
        return ragged(name, geometry, prefixes, rows, padded=padded - len(prefixes), seed=seed, first_page=first_page)
    if mode is Mode.RAGGED_VERIFY:
        budget = max_budget(geometry)
        return device_rows(
            name, geometry, prefixes, rows, budget, tree=tree, padded=padded, seed=seed, first_page=first_page
        )
    return uniform(name, geometry, mode, prefixes, padded, step=step, tree=tree, seed=seed, first_page=first_page)


def device_tree(tree: str, rows: int, seed: int) -> tuple[int, ...]:
    """Return the parents of a request's new tokens in RAGGED_VERIFY, where a request may have fewer than two."""
    return chain(rows) if tree == "chain" or rows < 2 else tuple(verify_tree(tree, rows, seed))


def block_masks(mode: Mode, tail: int) -> tuple[tuple[int, ...], ...]:
    """Return the masks of a draft block, in which every new token sees all of them; () in other modes."""
    return (tuple(range(tail)),) * tail if mode is Mode.DRAFT_BLOCK else ()


@lru_cache(maxsize=64)
def _truth(requests: tuple[Request, ...], page_size: int, window_left: int) -> Truth:
    """Return the slot sets of these requests. Results are cached, because checks run each forward many times."""
    return enumerate_truth(requests, page_size, window_left)


@lru_cache(maxsize=64)
def _lists(requests: tuple[Request, ...], page_size: int, width: int, draw: int) -> Lists:
    """Return the lists of these requests' rows."""
    return choose(_truth(requests, page_size, -1), requests, width, draw)


def with_pages(
    name: str,
    geometry: Geometry | StateGeometry,
    mode: Mode,
    step: int,
    requests: list[Request],
    causal: bool,
    seed: int,
    first_page: int,
) -> ForwardCase:
    """Assign shuffled page ids: each live request gets its own pages, and each padded request gets null page 0."""
    size = page_size_of(geometry)
    least = int(isinstance(geometry, StateGeometry))
    needs = [max(least, pages(one.prefix + one.tail, size)) if one.live else 0 for one in requests]
    start = max(1, first_page)
    ids = list(range(start, start + sum(needs)))
    random.Random(f"pages {seed}").shuffle(ids)
    placed = []
    for n, (one, need) in enumerate(zip(requests, needs, strict=True)):
        mine = tuple(ids.pop() for _ in range(need))
        placed.append(replace(one, pages=mine if one.live else _null(n, one, size, 1)))
    last = start + sum(needs) + TRAPS
    of_layer: Any = geometry
    return ForwardCase(name, of_layer, mode, step, tuple(placed), causal, last, 1)


def _null(n: int, request: Request, page_size: int, null_pages: int) -> tuple[int, ...]:
    """Return the null pages of a padded request: page 0, or separate null pages if the backend needs unique slots."""
    need: int = max(1, pages(request.tail, page_size))
    if null_pages == 1:
        return (0,) * need
    return tuple((n * need + i) % null_pages for i in range(need))
