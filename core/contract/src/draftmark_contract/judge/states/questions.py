"""Items of layers with recurrent state: verifies, commits, unequal rows, fresh requests, chunks, padding, histories.

Each item is a list of rounds for a check of `checks.state`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...check import ContractViolation
from ...runner.item import Item, item_of
from ..questions.building import case_of
from .driver import REQUESTS, Part, Round, StateCapabilities, decode, prefill, verify
from .harness import StateLayerHarness
from .layer import Layer

PARENTS, COMMIT = "state.rows_follow_their_parents", "state.commit_keeps_the_path"
LEAVES, ROUNDS = "state.verify_leaves_the_slot", "state.rounds_of_any_rows"
FRESH, CHUNKS, PADDING = "state.no_prefix_is_zeros", "state.chunks_are_one_prefill", "state.padding_touches_no_slot"
RULES = (PARENTS, COMMIT, LEAVES, ROUNDS, FRESH, CHUNKS, PADDING)

AS_TWO = "a round of fewer rows after {0} accepted, then a full round: rows, states and windows against float64"
AS_SIDE = "requests of one round have unequal numbers of rows"
AS_HISTORY = "random rounds: requests join and leave, rows and accepted counts vary, prompts arrive in chunks"
AS_STATE = "the state; an engine may roll the window and write it again at the commit"
AS_ALONE = "a batch of one request, whose last chunk is one row"
AS_PLAIN = "a layer without speculation"
PROMPT = 9
TREES = {
    "fork": (-1, 0, 0, 1, 2, 2),
    "wide": (-1, 0, 0, 0, 0, 0),
    "comb": (-1, 0, 1, 0, 3, 2),
}
"""Trees of six rows: parents precede children."""
ROUNDS_OF_HISTORY = 24


def questions(caps: StateCapabilities) -> list[Item]:
    """Return the items of every layer. Building them opens no layer."""
    found: list[Item] = []
    for layer in caps.layers:
        items = _Items(caps, layer)
        found += [*items.verifies(), *items.commits(), *items.unequal(), *items.fresh(), *items.chunks()]
        found += [*items.padded(), *items.histories()]
    order = {rule: number for number, rule in enumerate(RULES)}
    return sorted(found, key=lambda item: order[item.rule])


class _Items:
    """Builds the items of one layer."""

    def __init__(self, caps: StateCapabilities, layer: Layer) -> None:
        self.caps, self.layer, self.top = caps, layer, caps.drafts

    def item(self, rule: str, case: str, rounds: Sequence[Round], asks: str = "", drafts: int = 0) -> Item:
        """Return an item of a rule's check; `drafts` is the most rows of its verifies, if not the layer's."""
        caps = replace(self.caps, drafts=drafts) if drafts else self.caps
        return case_of(caps, rule, f"{self.layer.name}-{case}", rounds, asks)

    def verifies(self) -> list[Item]:
        """Return items with one verify after a prompt."""
        found = []
        for rows in (1, 2, 3, 4, 8) if self.caps.ragged else (2, 3, 4, 8):
            rounds = self._verified([range(-1, rows - 1)] * 2)
            found.append(self.item(PARENTS, f"chain{rows}", rounds, drafts=max(rows, 2)))
        if self.caps.decodes:
            found.append(self.item(PARENTS, "decode", self._decodes(), AS_PLAIN, drafts=1))
        if self.caps.trees:
            for name, parents in TREES.items():
                rounds = self._verified([parents] * 2)
                found.append(self.item(PARENTS, f"tree-{name}", rounds, drafts=len(parents)))
            found.append(self.item(PARENTS, "trees", self._verified(list(TREES.values())), drafts=6))
        return found

    def commits(self) -> list[Item]:
        """Return items that accept each number of rows, or each leaf of a tree, and run another round."""
        top, found = self.top, []
        chain = tuple(range(-1, top - 1))
        for kept in range(1, top + 1):
            rounds = [self._begin(0, 1), *[self._pair(chain).keeping({0: range(kept), 1: (0,)})] * 2]
            found.append(self.item(COMMIT, f"chain{top}-accept{kept}", rounds))
        if self.caps.trees:
            for name, parents in TREES.items():
                paths = [_path(parents, leaf) for leaf in range(len(parents))]
                pair = self._pair(parents)
                rounds = [pair.keeping({0: path, 1: paths[-1 - n]}) for n, path in enumerate(paths)]
                found.append(self.item(COMMIT, f"tree-{name}", [self._begin(0, 1), *rounds], drafts=len(parents)))
        if self.caps.read_only:
            found.append(self._unmoved(f"chain{top}", chain, self.caps))
            if self.caps.trees:
                found.append(self._unmoved("tree-fork", TREES["fork"], replace(self.caps, drafts=6)))
        return found

    def unequal(self) -> list[Item]:
        """Return items with fewer rows than the largest verify, also next to full verifies."""
        top, found = self.top, []
        if not self.caps.ragged:
            return []
        for rows in range(1, top):
            for kept in range(1, top + 1):
                sizes = ((top, kept), (rows, rows), (top, top))
                rounds = [self._begin(0), *(self._chains({0: size}) for size in sizes)]
                found.append(self.item(ROUNDS, f"rows{rows}-after-accept{kept}", rounds, AS_TWO.format(kept)))
        beside = [self._begin(0, 1, 2)]
        for turn in range(4):
            three = [(top, 1 + turn % top), (1 + turn % top, 1), (max(1, top - 1 - turn % top), 1)]
            beside.append(self._chains(dict(enumerate(three))))
        found.append(self.item(ROUNDS, "beside", beside, AS_SIDE))
        return found

    def fresh(self) -> list[Item]:
        """Return items with new requests over slots with old contents."""
        found = []
        for rows in (1, 2, 3, 4, 17):
            first = self._round(prefill(0, rows), prefill(1, rows + 1), starts=(0, 1))
            found.append(self.item(FRESH, f"prompt{rows}", [first, self._all(0, 1)]))
        every = range(REQUESTS)
        again = self._round(prefill(2, 1), prefill(4, 5), starts=(2, 4))
        rounds = [self._begin(*every), self._all(*every), again, self._all(*every)]
        found.append(self.item(FRESH, "second-owner", rounds))
        return found

    def chunks(self) -> list[Item]:
        """Return items with prompts in pieces."""
        cuts = ((1, 12), (12, 1), (7, 6), (2, 1, 10), (66, 3), (64, 64))
        found = [self.item(CHUNKS, "+".join(map(str, cut)), self._chunked(cut, 2)) for cut in cuts]
        found.append(self.item(CHUNKS, "12+1-alone", self._chunked((12, 1), 1), AS_ALONE))
        return found

    def padded(self) -> list[Item]:
        """Return items with padding requests after live ones."""
        if not self.caps.padded:
            return []
        found = []
        for n in (1, 3):
            verifies = [self._chains({one: (self.top, kept) for one in (0, 1)}, n) for kept in (1, self.top)]
            found.append(self.item(PADDING, f"verify-pad{n}", [self._begin(0, 1), *verifies]))
        if self.caps.decodes:
            rounds = [self._begin(0, 1), *[self._round(decode(0), decode(1), padding=2)] * 2]
            found.append(self.item(PADDING, "decode-pad2", rounds, AS_PLAIN, drafts=1))
        return found

    def histories(self) -> list[Item]:
        """Return items with many rounds."""
        return [self.item(ROUNDS, f"history{seed}", self._history(seed), AS_HISTORY) for seed in range(3)]

    # -- rounds -------------------------------------------------------------------------------------------

    def _round(self, *parts: Part, padding: int = 0, starts: Sequence[int] = ()) -> Round:
        return Round(self.layer, parts, padding, tuple(starts))

    def _begin(self, *requests: int) -> Round:
        return self._round(*(prefill(one, PROMPT + one) for one in requests), starts=requests)

    def _pair(self, parents: Sequence[int]) -> Round:
        return self._round(*(verify(one, parents=parents) for one in (0, 1)))

    def _chains(self, sizes: Mapping[int, tuple[int, int]], padding: int = 0) -> Round:
        """Return verifies of chains that keep their first rows: request → (rows, rows to keep)."""
        made = self._round(*(verify(one, rows) for one, (rows, _) in sizes.items()), padding=padding)
        return made.keeping({one: range(kept) for one, (_, kept) in sizes.items()})

    def _all(self, *requests: int) -> Round:
        return self._chains({one: (self.top, 1 + one % self.top) for one in requests})

    def _verified(self, trees: Sequence[Sequence[int]]) -> list[Round]:
        parts = [verify(one, parents=tuple(parents)) for one, parents in enumerate(trees)]
        return [self._begin(*range(len(trees))), self._round(*parts)]

    def _chunked(self, cuts: Sequence[int], requests: int) -> list[Round]:
        every = range(requests)
        rounds = [
            self._round(*(prefill(one, rows) for one in every), starts=() if number else every)
            for number, rows in enumerate(cuts)
        ]
        return [*rounds, self._all(*every)]

    def _decodes(self) -> list[Round]:
        found = [self._begin(0, 1, 2), self._round(decode(0), decode(1), decode(2))]
        found.append(self._round(decode(1), decode(2)))
        if self.caps.mixed:
            found.append(self._round(decode(0), decode(1), prefill(3, 5), starts=(3,)))
        return found

    def _history(self, seed: int) -> list[Round]:
        dice, caps, found = random.Random(seed), self.caps, list[Round]()
        left: dict[int, list[int]] = {}
        """Chunks that each request's prompt still has; [] for a request that decodes."""
        starts: list[int] = []
        for _ in range(ROUNDS_OF_HISTORY):
            if len(left) < REQUESTS and dice.random() < 0.6:
                request = min(set(range(REQUESTS)) - set(left))
                starts.append(request)
                left[request] = [dice.randint(1, 7) for _ in range(dice.randint(1, 2))]
            sizes = {
                one: dice.randint(1, caps.drafts) if caps.ragged else caps.drafts
                for one, cuts in left.items()
                if not cuts
            }
            prompts = [one for one, cuts in left.items() if cuts and (caps.mixed or not sizes or dice.random() < 0.5)]
            if prompts and not caps.mixed:
                sizes = {}
            parts = [verify(one, rows) for one, rows in sizes.items()]
            parts += [prefill(one, left[one].pop(0)) for one in prompts]
            if parts:
                made = self._round(*parts, starts=starts)
                found.append(made.keeping({one: range(dice.randint(1, rows)) for one, rows in sizes.items()}))
                starts = []
            if dice.random() < 0.2:
                left.pop(dice.choice(list(left)), None)
        return found

    def _unmoved(self, case: str, parents: Sequence[int], caps: StateCapabilities) -> Item:
        """Return an item of a verify that leaves the state. It commits, because engines commit every verify."""

        def run() -> None:
            harness, (first, pair) = (
                StateLayerHarness(caps, self.layer, REQUESTS),
                (self._begin(0, 1), self._pair(parents)),
            )
            harness.assert_rounds([first])
            before = [harness.driver.state(one)[0] for one in (0, 1)]
            harness.assert_forward(pair, harness.load(pair))
            for one, state in enumerate(before):
                if not torch.equal(state, harness.driver.state(one)[0]):
                    raise ContractViolation("a verify changes the committed state", batch=pair, got=f"request {one}")
            harness.commit({0: [0], 1: [0]})

        return item_of(LEAVES, f"{self.layer.name}-{case}", run, AS_STATE)


def _path(parents: Sequence[int], leaf: int) -> list[int]:
    path = [leaf]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
