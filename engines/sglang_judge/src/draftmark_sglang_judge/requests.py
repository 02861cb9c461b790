"""Placement of a scene's requests in SGLang's pools: KV pages, rows of `req_to_token`, and each token's KV slot.

A scene is one forward of the judge.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from draftmark import Mode
from draftmark_contract.cases.trees import verify_tree
from draftmark_contract.oracle.history import Request, chain

from .setups import Scene, Setup


@dataclass(frozen=True)
class Placed:
    """Holds a scene's requests with their KV slots. Request n has row n + 1 of `req_to_token`; row 0 is for padding.

    Attributes:
        requests: requests as the contract's float64 reference takes them; in a draft round they have committed tokens
            only.
        slots: KV slot of each position, for each request.
    """

    scene: Scene
    setup: Setup
    requests: tuple[Request, ...]
    slots: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(request, row) of each query row, in order. In a draft step, each branch is a row."""
        count = [self.setup.topk] * len(self.requests) if self.scene.mode is Mode.DRAFT else None
        return [
            (n, row)
            for n, one in enumerate(self.requests)
            for row in range(count[n] if count is not None else one.rows)
        ]

    def draft_slot(self, request: int, branch: int, step: int) -> int:
        """Return the KV slot of a draft token, as SGLang assigns it (`assign_draft_cache_locs` in `spec_utils.py`)."""
        length, steps = self.scene.prefixes[request], self.setup.num_steps
        if self.setup.page_size == 1 or self.setup.topk == 1:
            return self.slots[request][length + branch * steps + step]
        return self._branch_slot(request, branch, length % self.setup.page_size + step)

    @property
    def copied(self) -> list[tuple[int, int]]:
        """(source slot, target slot) pairs that copy the prefix's last, partial page to each branch after the first.

        SGLang's workers copy it before a draft round (`duplicate_prefix_tail_to_draft_branches`), and FA3 reads it.
        """
        page = self.setup.page_size
        if self.scene.mode is not Mode.DRAFT or page == 1 or self.setup.topk == 1:
            return []
        return [
            (self._branch_slot(n, 0, offset), self._branch_slot(n, branch, offset))
            for n, length in enumerate(self.scene.prefixes)
            for branch in range(1, self.setup.topk)
            for offset in range(length % page)
        ]

    def _branch_slot(self, request: int, branch: int, offset: int) -> int:
        """Return the KV slot of a draft branch at an offset from the end of the prefix's last whole page."""
        length, page = self.scene.prefixes[request], self.setup.page_size
        last = length % page
        pages = -(-(last + self.setup.num_steps) // page)
        return self.slots[request][length - last + branch * pages * page + offset]


def place(scene: Scene, setup: Setup, num_pages: int) -> Placed:
    """Assign random KV pages to all requests of a scene, enough for every token that the forward may store.

    Page 0 is not assigned, because SGLang uses it for padding.
    """
    size, dice = setup.page_size, random.Random(f"{scene.name} {scene.seed}")
    needs = [-(-_positions(scene, setup, n) // size) for n in range(len(scene.prefixes))]
    ids = dice.sample(range(1, num_pages), sum(needs))
    requests, slots = [], []
    for n, (prefix, need) in enumerate(zip(scene.prefixes, needs, strict=True)):
        pages = tuple(ids.pop() for _ in range(need))
        requests.append(_request(scene, setup, n, prefix, pages))
        slots.append(tuple(page * size + offset for page in pages for offset in range(size)))
    return Placed(scene, setup, tuple(requests), tuple(slots))


def _request(scene: Scene, setup: Setup, n: int, prefix: int, pages: tuple[int, ...]) -> Request:
    if scene.mode is Mode.DRAFT:
        return Request(prefix, pages, (), 0)
    rows = {Mode.DECODE: 1, Mode.VERIFY: setup.num_draft_tokens, Mode.DRAFT_EXTEND: setup.num_draft_tokens}
    tail = rows.get(scene.mode) or scene.rows[n]
    tree = scene.mode is Mode.VERIFY and scene.tree != "chain"
    return Request(prefix, pages, verify_tree(scene.tree, tail, scene.seed + n) if tree else chain(tail), tail)


def _positions(scene: Scene, setup: Setup, n: int) -> int:
    """Return how many positions of a request (committed and new tokens) need KV slots in a scene's forward."""
    prefix, page = scene.prefixes[n], setup.page_size
    if scene.mode is not Mode.DRAFT:
        return prefix + max(1, setup.num_draft_tokens, *(scene.rows or (1,)))
    pages = -(-(prefix % page + setup.num_steps) // page)
    return max(prefix + setup.topk * setup.num_steps, prefix - prefix % page + setup.topk * pages * page)
