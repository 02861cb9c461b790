"""Items of layers with recurrent state: verifies, commits, unequal rows, fresh requests, chunks, padding, histories."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...check import ContractViolation
from ...runner.item import Item, item_of
from .driver import Round, StateCapabilities, decode, prefill, verify
from .layer import Layer
from .subject import REQUESTS, StateSubject

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
        self.caps, self.layer = caps, layer

    def item(self, rule: str, case: str, body: Callable[[StateSubject], None], asks: str = "", drafts: int = 0) -> Item:
        """Return an item that opens the layer, with `drafts` rows of a verify if given, and calls `body`."""
        caps = replace(self.caps, drafts=drafts) if drafts else self.caps

        def run() -> None:
            body(StateSubject(caps, self.layer))

        return item_of(rule, f"{self.layer.name}-{case}", run, asks)

    def verifies(self) -> list[Item]:
        """Return items with one verify after a prompt."""
        found = [
            self.item(PARENTS, f"chain{rows}", partial(_verify, [range(-1, rows - 1)] * 2), drafts=max(rows, 2))
            for rows in ((1, 2, 3, 4, 8) if self.caps.ragged else (2, 3, 4, 8))
        ]
        if self.caps.decodes:
            found.append(self.item(PARENTS, "decode", _decode, AS_PLAIN, drafts=1))
        if self.caps.trees:
            for name, parents in TREES.items():
                found.append(self.item(PARENTS, f"tree-{name}", partial(_verify, [parents] * 2), drafts=len(parents)))
            found.append(self.item(PARENTS, "trees", partial(_verify, list(TREES.values())), drafts=6))
        return found

    def commits(self) -> list[Item]:
        """Return items that accept each number of rows, or each leaf of a tree, and run another round."""
        top = self.caps.drafts
        found = []
        for kept in range(1, top + 1):
            body = partial(_commit, range(-1, top - 1), range(kept))
            found.append(self.item(COMMIT, f"chain{top}-accept{kept}", body))
        if self.caps.trees:
            for name, parents in TREES.items():
                paths = [_path(parents, leaf) for leaf in range(len(parents))]
                body = partial(_commit_each, parents, paths)
                found.append(self.item(COMMIT, f"tree-{name}", body, drafts=len(parents)))
        if self.caps.read_only:
            found.append(self.item(LEAVES, f"chain{top}", partial(_unmoved, range(-1, top - 1)), AS_STATE))
            if self.caps.trees:
                found.append(self.item(LEAVES, "tree-fork", partial(_unmoved, TREES["fork"]), AS_STATE, 6))
        return found

    def unequal(self) -> list[Item]:
        """Return items with fewer rows than the largest verify, also next to full verifies."""
        top, found = self.caps.drafts, []
        if not self.caps.ragged:
            return []
        for rows in range(1, top):
            for kept in range(1, top + 1):
                body = partial(_shorter, rows, kept)
                found.append(self.item(ROUNDS, f"rows{rows}-after-accept{kept}", body, AS_TWO.format(kept)))
        found.append(self.item(ROUNDS, "beside", _beside, AS_SIDE))
        return found

    def fresh(self) -> list[Item]:
        """Return items with new requests over slots with old contents."""
        found = [self.item(FRESH, f"prompt{rows}", partial(_fresh, rows)) for rows in (1, 2, 3, 4, 17)]
        found.append(self.item(FRESH, "second-owner", _second_owner))
        return found

    def chunks(self) -> list[Item]:
        """Return items with prompts in pieces."""
        cuts = ((1, 12), (12, 1), (7, 6), (2, 1, 10), (66, 3), (64, 64))
        found = [self.item(CHUNKS, "+".join(map(str, cut)), partial(_chunks, cut, 2)) for cut in cuts]
        found.append(self.item(CHUNKS, "12+1-alone", partial(_chunks, (12, 1), 1), AS_ALONE))
        return found

    def padded(self) -> list[Item]:
        """Return items with padding requests after live ones."""
        if not self.caps.padded:
            return []
        found = [self.item(PADDING, f"verify-pad{n}", partial(_padded, n)) for n in (1, 3)]
        if self.caps.decodes:
            found.append(self.item(PADDING, "decode-pad2", _padded_decode, AS_PLAIN, drafts=1))
        return found

    def histories(self) -> list[Item]:
        """Return items with many rounds."""
        return [self.item(ROUNDS, f"history{seed}", partial(_history, seed), AS_HISTORY) for seed in range(3)]


def _begin(subject: StateSubject, *requests: int, rows: int = PROMPT) -> None:
    subject.start(*requests)
    subject.run(*(prefill(one, rows + one) for one in requests))


def _verify(trees: Sequence[Sequence[int]], subject: StateSubject) -> None:
    _begin(subject, *range(len(trees)))
    subject.run(*(verify(one, parents=tuple(parents)) for one, parents in enumerate(trees)))


def _commit(parents: Sequence[int], path: Sequence[int], subject: StateSubject) -> None:
    _begin(subject, 0, 1)
    for _ in range(2):
        subject.run(*(verify(one, parents=tuple(parents)) for one in (0, 1)))
        subject.commit({0: path, 1: path[:1]})


def _commit_each(parents: Sequence[int], paths: Sequence[Sequence[int]], subject: StateSubject) -> None:
    _begin(subject, 0, 1)
    for number, path in enumerate(paths):
        subject.run(*(verify(one, parents=tuple(parents)) for one in (0, 1)))
        subject.commit({0: path, 1: paths[-1 - number]})


def _unmoved(parents: Sequence[int], subject: StateSubject) -> None:
    _begin(subject, 0, 1)
    parts = [verify(one, parents=tuple(parents)) for one in (0, 1)]
    before = [subject.driver.state(one)[0] for one in (0, 1)]
    subject.run(*parts)
    for one, state in enumerate(before):
        if not torch.equal(state, subject.driver.state(one)[0]):
            raise ContractViolation(
                "a verify changes the committed state", batch=Round(tuple(parts)), got=f"request {one}"
            )
    subject.commit({0: [0], 1: [0]})


def _shorter(rows: int, kept: int, subject: StateSubject) -> None:
    top = subject.caps.drafts
    _begin(subject, 0)
    for size in ((top, kept), (rows, rows), (top, top)):
        subject.round({0: size})


def _beside(subject: StateSubject) -> None:
    top = subject.caps.drafts
    _begin(subject, 0, 1, 2)
    for turn in range(4):
        sizes = [(top, 1 + turn % top), (1 + turn % top, 1), (max(1, top - 1 - turn % top), 1)]
        subject.round(dict(enumerate(sizes)))


def _fresh(rows: int, subject: StateSubject) -> None:
    subject.start(0, 1)
    subject.run(prefill(0, rows), prefill(1, rows + 1))
    _round_of_all(subject, 0, 1)


def _second_owner(subject: StateSubject) -> None:
    _begin(subject, *range(REQUESTS))
    _round_of_all(subject, *range(REQUESTS))
    subject.start(2, 4)
    subject.run(prefill(2, 1), prefill(4, 5))
    _round_of_all(subject, *range(REQUESTS))


def _chunks(cuts: Sequence[int], requests: int, subject: StateSubject) -> None:
    subject.start(*range(requests))
    for rows in cuts:
        subject.run(*(prefill(one, rows) for one in range(requests)))
    _round_of_all(subject, *range(requests))


def _padded(padding: int, subject: StateSubject) -> None:
    _begin(subject, 0, 1)
    for kept in (1, subject.caps.drafts):
        subject.round({one: (subject.caps.drafts, kept) for one in (0, 1)}, padding=padding)


def _decode(subject: StateSubject) -> None:
    _begin(subject, 0, 1, 2)
    subject.run(decode(0), decode(1), decode(2))
    subject.run(decode(1), decode(2))
    if subject.caps.mixed:
        subject.start(3)
        subject.run(decode(0), decode(1), prefill(3, 5))


def _padded_decode(subject: StateSubject) -> None:
    _begin(subject, 0, 1)
    for _ in range(2):
        subject.run(decode(0), decode(1), padding=2)


def _history(seed: int, subject: StateSubject) -> None:
    dice, caps = random.Random(seed), subject.caps
    left: dict[int, list[int]] = {}
    """Chunks that each request's prompt still has; [] for a request that decodes."""
    for _ in range(ROUNDS_OF_HISTORY):
        if len(left) < REQUESTS and dice.random() < 0.6:
            request = min(set(range(REQUESTS)) - set(left))
            subject.start(request)
            left[request] = [dice.randint(1, 7) for _ in range(dice.randint(1, 2))]
        sizes = {
            one: dice.randint(1, caps.drafts) if caps.ragged else caps.drafts for one, cuts in left.items() if not cuts
        }
        prompts = [one for one, cuts in left.items() if cuts and (caps.mixed or not sizes or dice.random() < 0.5)]
        if prompts and not caps.mixed:
            sizes = {}
        parts = [verify(one, rows) for one, rows in sizes.items()]
        parts += [prefill(one, left[one].pop(0)) for one in prompts]
        if parts:
            subject.run(*parts)
        if sizes:
            subject.commit({one: range(dice.randint(1, rows)) for one, rows in sizes.items()})
        if dice.random() < 0.2:
            left.pop(dice.choice(list(left)), None)


def _round_of_all(subject: StateSubject, *requests: int) -> None:
    top = subject.caps.drafts
    subject.round({one: (top, 1 + one % top) for one in requests})


def _path(parents: Sequence[int], leaf: int) -> list[int]:
    path = [leaf]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
