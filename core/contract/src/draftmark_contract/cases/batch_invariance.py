"""Requests by themselves and in drawn batches, to compare the bits of their outputs. Does not import torch.

Everything is drawn from a seed: attention shape, limits, lengths, trees, the other requests, their order and number,
and padding. So no batch size, length or place is special.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from draftmark.geometry import LAYOUT_FORMS, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from ..oracle.formulas import draft_steps, max_requests, rows_and_tail
from ..oracle.history import Request, chain
from ..profiles import MANDATORY
from .forwards import ForwardCase, block_masks, with_pages
from .graph_rounds import programs_of, sizes_of
from .trees import beams, verify_tree

SINCE = (1, 5)
SIZES = (((3, 12), (600, 1800)), ((3, 28), (200, 1200)), ((33, 128), (150, 400)), ((2, 3), (8300, 9900)))
"""(lowest, highest) number of requests and context length of each geometry that is drawn for a mode.

The first geometry has the core's attention shape. So has the third one, a crowd, in the core's modes.
"""
CROWDED = 2
"""Index of the crowd, which has one KV head in modes that the core does not have."""
DRAWN = 1
"""Index of the geometry with a drawn attention shape and drawn forms."""
LONG = 3
"""Index of the geometry with long contexts. It has one KV head."""
MOST_ROWS = 200
"""Most verify rows of a full batch."""
PROBES = 3
"""Requests that are compared in each draw."""
BATCHES = 3
"""Batches of each draw that contain some of these requests."""
ONE_KV_HEAD = AttentionShape(2, 1, 64, 128)
DTYPES = (*(("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2), ("bfloat16", "float8_e4m3fn"))
FEATURES: tuple[dict[str, Any], ...] = (
    *({}, {"window_left": 40}, {"logits_soft_cap": 30.0}, {"sinks": True}),
    {"window_left": 300, "logits_soft_cap": 20.0, "sinks": True},
)


@dataclass(frozen=True)
class Company:
    """A batch that contains some of the compared requests.

    Attributes:
        forward: the forward.
        places: (compared request, its index in the batch) of each compared request that is present.
    """

    forward: ForwardCase
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Draw:
    """Requests of one mode and geometry, and the batches in which they are compared.

    Attributes:
        geometry, mode: the geometry, with `Limits.batch_invariant`, and the mode of every forward.
        causal: the new tokens of every request form a chain.
        seed: seed of everything else.
    """

    geometry: Geometry
    mode: Mode
    causal: bool
    seed: str

    @cached_property
    def probes(self) -> tuple[Request, ...]:
        """The compared requests, without pages; the first one is as long as the limits allow."""
        dice, share = self._dice("probes"), self._most_rows // PROBES
        return tuple(self._request(dice, max(1, share), longest=n == 0) for n in range(self._count))

    def alone(self) -> list[Company]:
        """Return each compared request in a batch of its own."""
        return [self._company((n,), (), 0, f"alone-{n}") for n in range(self._count)]

    def batches(self) -> list[Company]:
        """Return drawn batches of one size each: other requests, another order, padding or none. The first is full."""
        sizes = [max_requests(self.geometry), *[0] * (BATCHES - 1)]
        return [self._batch(self._dice(f"batch {n}"), f"batch-{n}", most=size) for n, size in enumerate(sizes)]

    def of_sizes(self) -> Iterator[list[Company]]:
        """Yield drawn batches for each captured size: the first is captured, and its graph replays the others."""
        (program,) = programs_of(self.geometry)
        for size in sizes_of(self.geometry, program):
            dice = self._dice(f"graph {size}")
            yield [self._batch(dice, f"graph-{size}-{number}", size) for number in range(3)]

    @property
    def _count(self) -> int:
        return min(PROBES, self.geometry.limits.max_num_reqs)

    @property
    def _most_rows(self) -> int:
        """Rows of a forward with ragged rows: prefill rows, or the largest row budget."""
        limits = self.geometry.limits
        return limits.max_extend_tokens if self.mode is Mode.EXTEND else max(limits.row_budgets, default=1)

    @property
    def _step(self) -> int:
        """Step of every forward: the last one of a draft round."""
        return draft_steps(self.geometry) - 1 if self.mode is Mode.DRAFT else 0

    def _dice(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    def _request(self, dice: random.Random, room: int, longest: bool = False) -> Request:
        """Draw a request without pages.

        Args:
            room: most rows in EXTEND and RAGGED_VERIFY.
        """
        most, draft = self.geometry.limits.max_context_len, self.geometry.draft
        if self.mode is Mode.EXTEND:
            rows = tail = dice.randint(1, min(room, most))
            most -= rows
        elif self.mode is Mode.RAGGED_VERIFY:
            rows = tail = dice.randint(1, min(room, draft.num_draft_tokens))
        elif self.mode is Mode.DRAFT_BLOCK:
            rows = tail = draft.block_size
        else:
            rows, tail = rows_and_tail(self.geometry, self.mode, self._step)
        parents = chain(tail)
        if not self.causal:
            seed = dice.randrange(1 << 20)
            kind = dice.choice(("random", "deep", "unused", "star"))
            parents = beams(draft.topk, self._step, seed) if self.mode is Mode.DRAFT else verify_tree(kind, tail, seed)
        prefix = most if longest else drawn_size(dice, 1, most + 1) - 1
        return Request(prefix, (), parents, rows, masks=block_masks(self.mode, tail))

    def _batch(self, dice: random.Random, name: str, size: int = 0, most: int = 0) -> Company:
        """Draw a batch.

        Args:
            size: requests, padding included, or rows in RAGGED_VERIFY; 0 draws them.
            most: requests, padding included, of an eager batch; 0 draws them.
        """
        limits, ragged = self.geometry.limits, self.mode is Mode.RAGGED_VERIFY
        budget = (size or max(limits.row_budgets)) if ragged else 0
        reqs = size or most or drawn_size(dice, 1, max_requests(self.geometry))
        reqs = min(max_requests(self.geometry), budget) if ragged else reqs
        live = min(reqs, limits.max_num_reqs, dice.randint(1, reqs) if size else dice.choice((reqs, (reqs + 1) // 2)))
        room = budget or (limits.max_extend_tokens if self.mode is Mode.EXTEND else 1 << 30)
        present: list[int] = []
        for n in dice.sample(range(self._count), self._count):
            if len(present) < min(live, dice.randint(2, 1 + self._count)) and self.probes[n].rows <= room:
                present.append(n)
                room -= self.probes[n].rows
        others: list[Request] = []
        while len(others) + len(present) < live and room > 0:
            others.append(self._request(dice, max(1, room // 3)))
            room -= others[-1].rows
        padding = reqs - len(others) - len(present)
        return self._company(tuple(present), tuple(others), padding, name, budget, dice)

    def _company(
        self,
        present: tuple[int, ...],
        others: tuple[Request, ...],
        padding: int,
        name: str,
        budget: int = 0,
        dice: random.Random | None = None,
    ) -> Company:
        """Return a batch of these requests in drawn order, on drawn pages, with padded requests after them."""
        members = [*((n, self.probes[n]) for n in present), *((-1, one) for one in others)]
        if dice is not None:
            dice.shuffle(members)
        requests = [one for _, one in members]
        ragged = self.mode in (Mode.EXTEND, Mode.RAGGED_VERIFY)
        tail = 0 if ragged else self.probes[0].tail
        empty = Request(0, (), chain(tail), 0 if ragged else self.probes[0].rows, live=False)
        forward = with_pages(
            *(f"{self.mode.value}-{name}", self.geometry, self.mode, self._step),
            *([*requests, *[empty] * padding], self.causal, hash_of(f"{self.seed} {name}"), 0),
        )
        if self.mode is Mode.RAGGED_VERIFY:
            budgets = (rows for rows in self.geometry.limits.row_budgets if rows >= len(forward.rows))
            forward = replace(forward, budget=budget or min(budgets))
        places = tuple((n, index) for index, (n, _) in enumerate(members) if n >= 0)
        if dice is not None and places and dice.randrange(2):
            # Other requests may have the first pages of a compared one, as in a prefix cache.
            forks = [index for index, (n, _) in enumerate(members) if n < 0]
            forward = forward.forked([[dice.choice(places)[1], *forks]])
        return Company(forward, places)

    def __str__(self) -> str:
        return f"{self.mode.value}, {self._count} requests, seed {self.seed!r}"


def draws(*modes: Mode) -> list[Case]:
    """Return the drawn geometries of each of these modes."""
    return [Case(f"{mode.value}-{n}", _draw(mode, n), SINCE) for mode in modes for n in range(len(SIZES))]


def _draw(mode: Mode, number: int) -> Draw:
    seed = f"batch invariance {mode.value} {number}"
    dice = random.Random(seed)
    reqs, context = (drawn_size(dice, *span) for span in SIZES[number])
    most = max(2, min(16, MOST_ROWS // reqs))
    topk, steps, nodes = dice.randint(2, 4), dice.randint(2, 4), dice.randint(2, most)
    draft = DraftShape(topk, steps, nodes, block_size=dice.randint(2, 9))
    budgets = (2 * draft.num_draft_tokens, reqs * draft.num_draft_tokens)
    limits = Limits(
        *(reqs, context, dice.randint(60, 300), (2, reqs + dice.randint(0, 3))),
        row_budgets=budgets if mode is Mode.RAGGED_VERIFY else (),
        batch_invariant=True,
    )
    modes = tuple(dict.fromkeys((Mode.EXTEND, mode)))
    plain = mode in (Mode.EXTEND, Mode.DECODE)
    narrow = number == LONG or (number == CROWDED and not plain)
    shape = _shape(dice) if number == DRAWN else ONE_KV_HEAD if narrow else MANDATORY
    forms = LAYOUT_FORMS if number == DRAWN and dice.random() < 0.25 else ()
    geometry = Geometry.create(shape, limits, DraftShape() if plain else draft, modes=modes, forms=forms)
    trees = mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) and dice.random() < 0.7
    return Draw(geometry, mode, not trees and mode is not Mode.DRAFT, seed)


def _shape(dice: random.Random) -> AttentionShape:
    heads = dice.choice((1, 2, 4))
    return AttentionShape(
        *(heads * dice.randint(1, 8), heads, dice.choice((64, 80, 96, 128, 256)), dice.choice((5, 16, 32, 64, 128))),
        *dice.choice(DTYPES),
        **dice.choice(FEATURES),
    )


def drawn_size(dice: random.Random, low: int, high: int) -> int:
    """Draw a number between `low` and `high`, both included, with a uniform logarithm."""
    return min(high, int(math.exp(dice.uniform(math.log(low), math.log(high + 1)))))


def hash_of(text: str) -> int:
    """Return a number drawn from a text, the same in every process."""
    return random.Random(text).randrange(1 << 30)
