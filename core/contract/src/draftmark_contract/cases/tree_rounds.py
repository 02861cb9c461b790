"""Inputs that the decode loop passes to `TreeOps` for one round of draft trees, as plain lists. No torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

from draftmark.geometry import Geometry, Mode

from ..oracle.formulas import draft_steps, max_pages, max_prefix, max_requests, rows_and_tail
from ..oracle.history import Request, chain
from ..oracle.verify_tree import kept_path
from .trees import beams, verify_tree

KINDS = ("random", "unused", "star", "chain")
TOKENS = (5, 5 + 2**32, 6 + 2**40)
"""Token ids, which have 64 bits. Two of these are equal in their lower 32 bits."""


@dataclass
class Round:
    """Holds the draft trees and target tokens of one batch. Every list has one entry per request; the last is padding.

    Attributes:
        requests: trees, lengths and pages.
        drafts, targets: token of each node, and the target's token after the node. Unused nodes have the draft -1.
    """

    requests: list[Request]
    drafts: list[list[int]]
    targets: list[list[int]]

    def __str__(self) -> str:
        shown = zip(self.requests, self.drafts, self.targets, strict=True)
        return "".join(f"\n    {one} drafts={d} targets={t}" for one, d, t in shown)

    @property
    def kept(self) -> list[list[int]]:
        """Path of nodes in each tree that the target model accepts."""
        nodes = zip(self.drafts, self.requests, self.targets, strict=True)
        return [kept_path(drafts, one.parents, targets) for drafts, one, targets in nodes]


def make_round(geometry: Geometry, seed: int, first_page: int = 1) -> Round:
    """Make a round: trees of every kind, prefixes from 0 to the context limit, pages in random order."""
    dice = random.Random(seed)
    reqs, nodes, size = max_requests(geometry), geometry.draft.num_draft_tokens, geometry.attention.page_size
    columns, wall = max_pages(geometry), max_prefix(geometry)
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
    """Set the target's tokens so that the target accepts the drafts from the root to `node`, except unused drafts."""
    for child in request.lineage(node)[:-1]:
        if drafts[child] >= 0:
            targets[request.parents[child]] = drafts[child]


def any_paths(one: Round, seed: int) -> list[list[int]]:
    """Return one path of ascending nodes per tree, going through all kinds of path. A padded request keeps its root."""
    dice, nodes = random.Random(seed), len(one.drafts[0])
    return [_path(nodes, (seed + r) % 5, dice) if request.live else [0] for r, request in enumerate(one.requests)]


def _path(nodes: int, kind: int, dice: random.Random) -> list[int]:
    """Return ascending nodes from the root by `kind`: without node 1, every second, random, all, or only the root."""
    shifted = [0, *range(2, nodes)]
    chosen = [0, *sorted(dice.sample(range(1, nodes), dice.randrange(nodes)))]
    return (shifted, list(range(0, nodes, 2)), chosen, list(range(nodes)), [0])[kind]


def tails(geometry: Geometry) -> list[tuple[Mode, int, bool]]:
    """Return (mode, step, True for a tree) of every forward with equal row counts per request."""
    chains = (Mode.DECODE, Mode.DRAFT_EXTEND)
    found: list[tuple[Mode, int, bool]] = [(mode, 0, False) for mode in chains if mode in geometry.modes]
    if Mode.VERIFY in geometry.modes:
        found.append((Mode.VERIFY, 0, geometry.draft.topk > 1))
    if Mode.DRAFT in geometry.modes:
        found += [(Mode.DRAFT, step, geometry.draft.topk > 1) for step in range(draft_steps(geometry))]
    return found


def with_tails(one: Round, geometry: Geometry, mode: Mode, step: int, tree: bool, seed: int) -> list[Request]:
    """Return the round's requests with the new tokens that another mode gives them."""
    rows, tail = rows_and_tail(geometry, mode, step)
    found = []
    for r, request in enumerate(one.requests):
        parents = request.parents if mode is Mode.VERIFY and tree else chain(tail)
        if mode is Mode.DRAFT and tree:
            parents = beams(geometry.draft.topk, step, seed + r)
        found.append(Request(request.prefix, request.pages, parents, rows, request.live))
    return found
