"""Three geometries that are open at one time, as a model's full and window layers and its draft model are. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from draftmark.geometry import CORE_MODES, LAYOUT_FORMS, AttentionShape, DraftShape, Form, Geometry, Limits, Mode

from ..check import Case
from ..oracle.formulas import draft_steps, max_prefix, max_requests
from ..profiles import MANDATORY
from .forwards import ForwardCase, device_rows, ragged, uniform
from .histories import CALLS

SINCE = (1, 5)
ROUNDS = 5
"""Number of rounds of one item. In each of them every geometry runs one forward."""
Triple = tuple[Geometry, Geometry, Geometry]


@dataclass(frozen=True)
class Turns:
    """Holds three geometries, and the name from which their forwards and the order of the calls are drawn."""

    name: str
    geometries: Triple

    @property
    def dice(self) -> random.Random:
        """A new generator; equal for equal names."""
        return random.Random(f"turns {self.name}")


def triples() -> list[Case]:
    """Return drawn triples of geometries: in core modes on two page sizes, and in seven modes with forms or without.

    In "twins" the third geometry equals the first, as the geometries of two MTP modules do.
    """
    kinds = {
        "chain": (CORE_MODES, 16, (), 1, 0.0),
        "core": (CORE_MODES, 16, (), 3, 20.0),
        "core-page128": (CORE_MODES, 128, (), 2, 0.0),
        "seven": (tuple(Mode), 16, (), 1, 0.0),
        "seven-forms": (tuple(Mode), 16, LAYOUT_FORMS, 3, 20.0),
    }
    drawn = [Turns(name, _triple(name, *kind)) for name, kind in kinds.items()]
    full, window, _ = drawn[0].geometries
    drawn.append(Turns("twins", (full, window, full)))
    return [Case(one.name, one, SINCE, one.geometries) for one in drawn]


def _triple(
    name: str, modes: tuple[Mode, ...], page_size: int, forms: tuple[Form, ...], topk: int, cap: float
) -> Triple:
    """Return a full layer, a window layer of the same model, and a layer of a draft model of another shape.

    Args:
        topk: most branches of a draft step.
        cap: soft cap of the window layer and of the draft model; 0 for none.
    """
    dice = random.Random(f"geometries {name}")
    wall = 60 if page_size < 128 else 150

    def limits() -> Limits:
        most = dice.randint(3, 5)
        return Limits(most, wall + dice.randrange(20), 24, capture_batch_sizes=(1, most), row_budgets=(6, 11))

    def attention() -> AttentionShape:
        heads, kv_heads = dice.choice(((4, 2), (4, 4), (8, 2), (4, 1)))
        scale = dice.choice((None, 0.3))
        return AttentionShape(heads, kv_heads, 64, page_size, "float16", "float16", softmax_scale=scale)

    def draft() -> DraftShape:
        return DraftShape(dice.randint(1, topk), dice.randint(3, 4), dice.randint(3, 6), dice.randint(2, 5))

    full, trees, model = attention(), draft(), limits()
    window = replace(full, window_left=dice.randint(3, 30), logits_soft_cap=cap)
    other = replace(attention(), window_left=dice.choice((-1, 11)), logits_soft_cap=cap / 4)
    first, second = (Geometry.create(one, model, trees, modes=modes, forms=forms) for one in (full, window))
    return first, second, Geometry.create(other, limits(), draft(), modes=modes, forms=forms)


MANY = 20
"""Geometries that are open at one time; more than a small cache of a backend holds."""


def many() -> list[Case]:
    """Return a forward of each of `MANY` geometries of the core profile, which differ in their limits."""
    found = []
    for number in range(MANY):
        limits = Limits(2 + number % 3, 60 + 7 * number, 8, (1,))
        geometry = Geometry.create(MANDATORY, limits, modes=(Mode.EXTEND, Mode.DECODE))
        found.append(uniform(f"decode-{number}", geometry, Mode.DECODE, (50 + number, 3), 2, seed=number))
    return [Case("core", tuple(found), SINCE)]


def forward_of(
    geometry: Geometry, dice: random.Random, mode: Mode | None = None, most: int | None = None
) -> ForwardCase:
    """Return a drawn forward of a geometry: lengths, rows, padding, tree and pages vary. Topk 1 gives chains.

    Args:
        mode: drawn by default.
        most: longest prefix; the geometry's limit by default.
    """
    wall = max_prefix(geometry) if most is None else min(most, max_prefix(geometry))
    mode = dice.choice(geometry.modes) if mode is None else mode
    live, seed = dice.randint(1, geometry.limits.max_num_reqs), dice.randrange(1000)
    lens = [dice.randint(0, wall) for _ in range(live)]
    if mode is Mode.EXTEND:
        rows = [dice.randint(n == 0, geometry.limits.max_extend_tokens // live) for n in range(live)]
        cut = [min(n, geometry.limits.max_context_len - q) for n, q in zip(lens, rows, strict=True)]
        return ragged("extend", geometry, cut, rows, padded=dice.randint(0, max_requests(geometry) - live), seed=seed)
    tree = dice.choice(("random", "deep", "star"))
    if mode is Mode.RAGGED_VERIFY:
        budget = geometry.limits.row_budgets[-1]
        counts: list[int] = []
        for _ in lens:
            counts.append(min(dice.randint(0, geometry.draft.num_draft_tokens), budget - sum(counts)))
        return as_drafted(device_rows(mode.value, geometry, lens, counts, budget, tree=tree, seed=seed))
    step = dice.randrange(draft_steps(geometry)) if mode is Mode.DRAFT else 0
    padded = dice.randint(live, max_requests(geometry))
    return as_drafted(uniform(mode.value, geometry, mode, lens, padded, step=step, tree=tree, seed=seed))


def as_drafted(forward: ForwardCase) -> ForwardCase:
    """Return the forward with chains instead of trees if topk is 1.

    XQA computes a row's position from its index, which is wrong for a tree under a window. Its plugin therefore serves
    window layers with topk 1 only. Trees for topk 1, which n-gram drafters make, are in checks without a window.
    """
    verifies = forward.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY)
    return forward.with_chains() if verifies and forward.geometry.draft.topk == 1 else forward


def orders(counts: Sequence[int], dice: random.Random) -> Iterator[list[int]]:
    """Yield orders in which geometries make their calls: entry i is the geometry of the i-th call. Endless.

    The first orders are the regular ones: one call of each in turn, forward and backward; then one geometry's whole
    forward between the first call and the other calls of each other geometry. The orders after them are drawn.

    Args:
        counts: number of calls of each geometry.
    """
    numbers = list(range(len(counts)))
    by_turns = [n for call in range(max(counts)) for n in numbers if call < counts[n]]
    yield by_turns
    yield by_turns[::-1]
    for inner in numbers:
        outer = [n for n in numbers if n != inner]
        yield [*outer, *[inner] * counts[inner], *(n for n in outer for _ in range(counts[n] - 1))]
    while True:
        drawn = [n for n in numbers for _ in range(counts[n])]
        dice.shuffle(drawn)
        yield drawn


def shown(order: Sequence[int]) -> str:
    """Return an order of calls as text, for messages: the geometry's number and the call."""
    done = dict.fromkeys(order, 0)
    words = []
    for n in order:
        words.append(f"{n}.{done[n]}")
        done[n] += 1
    return f"geometry.call in order: {' '.join(words)} (calls {', '.join(CALLS)})"
