"""Forwards and rounds over recurrent state, one function for each check. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from draftmark.geometry import (
    STATE_MODES,
    DraftShape,
    Limits,
    Mode,
    StateGeometry,
)

from ..check import Case
from ..oracle.history import NO_PARENT, Request
from . import state
from .forwards import ForwardCase
from .geometries import Shape
from .state import CHAIN, FEW, LAYER_COUNT, LAYERS, LIMITS, ROUNDED, SINCE, TREE, geometry_of
from .state_rounds import TREES, Round, StateEngine

VERIFIES = (Mode.VERIFY, Mode.RAGGED_VERIFY)
KINDS = ("random", "star", "deep", "unused")
COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64)
"""Rows of a request. Mask words change after 32 rows."""
MANY = 16
"""Rows above which fewer layers and trees run."""
LAST_OF_MANY = ((NO_PARENT, 0, 15), (31, 32, 63))
"""Last accepted rows of requests with 64 rows, in two batches."""
CHECKED = 5
"""Rows above which checkpoints of one layer are compared."""
LARGE = ("gdn", "conv")
"""Layers with commits and checkpoints of trees of 64 rows, and with one kind of verify only."""


def draft_of(rows: int, tree: bool) -> DraftShape:
    """Return drafts of `rows` rows: a chain, or trees."""
    return DraftShape(topk=3 if tree and rows > 1 else 1, num_steps=max(1, rows - 1), num_draft_tokens=rows)


def _limits(rows: int) -> Limits:
    return replace(LIMITS, row_budgets=(2 * rows + 3, 4 * rows + 3))


def case_of(name: str, value: object, geometry: StateGeometry, label: str = "") -> Case:
    """Return a case of these checks, named by a geometry."""
    return Shape(name, geometry, SINCE).case(value, label)


def trees() -> list[Case]:
    """Return chains, trees and forests of every number of rows, in VERIFY and RAGGED_VERIFY.

    One layer of each recurrence runs every number up to `MANY`; the other layers run every second one.
    """
    found: list[Case] = []
    for at, rows in enumerate(COUNTS):
        names = [name for n, name in enumerate(LAYERS) if name in FEW or (n + at) % 2]
        if rows > MANY:
            names = [[*LAYERS][at % len(LAYERS)], FEW[at % len(FEW)]]
        for name in dict.fromkeys(names):
            for tree in (False, True)[rows > 1 and name not in FEW : 1 + (rows > 1)]:
                geometry = geometry_of(name, draft_of(rows, tree), _limits(rows), layers=1)
                found.append(
                    case_of(name, _trees(geometry, tree, at), geometry, f"{'tree' if tree else 'chain'}{rows}")
                )
    return found


def _trees(geometry: StateGeometry, tree: bool, seed: int) -> list[ForwardCase]:
    rows, lens = geometry.draft.num_draft_tokens, (37, 0, 3)
    few = rows > MANY
    kinds = ("chain",) if not tree else KINDS[seed % 4 :][:1] if few else KINDS
    made = [state.verify(geometry, lens[: 2 if few else 3], tree=kind, padded=4, seed=seed) for kind in kinds]
    if tree:
        forest = state.with_parents(made[0], lambda count, n: state.forest(count, seed + n))
        made.append(state.accept(forest, state.any_leaf(seed)))
    counts = (rows, max(1, rows // 2), 1, 0, min(2, rows))[: 3 if few else 5]
    made.append(state.verify_rows(geometry, (2, 0, 41, 5, 1)[: len(counts)], counts, tree=kinds[-1], seed=seed))
    return made


def paths() -> list[Case]:
    """Return verifies that accept every row in turn, and none; chains accept every count."""
    found: list[Case] = []
    for name in LAYERS:
        for rows, tree in ((5, False), (7, True), (16, True), (64, True)):
            if rows > MANY and name not in LARGE:
                continue
            limits = replace(_limits(rows), max_num_reqs=10, capture_batch_sizes=(1, 12))
            geometry = geometry_of(name, draft_of(rows, tree), limits, layers=1 if tree else LAYER_COUNT)
            label = f"{'tree' if tree else 'chain'}{rows}"
            found.append(case_of(name, _paths(geometry, tree), geometry, label))
    return found


def _paths(geometry: StateGeometry, tree: bool) -> list[ForwardCase]:
    rows = geometry.draft.num_draft_tokens
    every, made = [NO_PARENT, *range(rows)], []
    padded = 12 if rows <= MANY else 4
    kinds = ("chain",) if not tree else ("random", "deep") if rows < MANY else ("random",)
    for number, kind in enumerate(kinds):
        groups = [every[first : first + 9] for first in range(0, len(every), 9)]
        for turn, leaves in enumerate(groups if rows <= MANY else LAST_OF_MANY):
            lens = [(3 * n + 9 * turn) % 50 for n in range(len(leaves))]
            made.append(
                state.verify(geometry, lens, tree=kind, padded=padded, seed=number, choice=_these(leaves), name="path")
            )
    counts = [(n * 5) % rows + 1 for n in range(3 if rows > MANY else 4)]
    for shift in range(2):
        leaves = [count - 1 - shift if count > shift else NO_PARENT for count in counts]
        lens = [0, 1, 2, 30][: len(counts)]
        made.append(
            state.verify_rows(
                geometry, lens, counts, tree=kinds[0], seed=shift, choice=_these(leaves), name="path-ragged"
            )
        )
    return made


def _these(leaves: Sequence[int]) -> state.Choice:
    return lambda n, one: leaves[n]


def _turning(leaf: Callable[[int, int], int]) -> state.Choice:
    """Return a choice by a request's number and rows; nothing for a request without rows."""
    return lambda n, one: leaf(n, one.rows) if one.rows else NO_PARENT


def verifies() -> list[Case]:
    """Return verifies of one pool, and forwards of other modes after them."""
    found: list[Case] = []
    for name in LAYERS:
        for draft in (CHAIN, TREE):
            geometry = geometry_of(name, draft)
            kind = "chain" if draft is CHAIN else "random"
            made = [state.verify(geometry, (5, 0, 33), tree=kind, padded=4, seed=seed) for seed in (1, 2)]
            made.append(state.verify_rows(geometry, (5, 0, 33), (3, 1, 5), tree=kind, seed=3))
            slots = [one.pages for one in made[0].requests]
            same = [
                replace(
                    forward,
                    num_pages=made[0].num_pages,
                    requests=tuple(replace(one, pages=slots[min(n, 3)]) for n, one in enumerate(forward.requests)),
                )
                for forward in made
            ]
            found.append(case_of(name, same, geometry, "chain" if draft is CHAIN else "tree"))
    return found


def any_rows() -> list[Case]:
    """Return rounds of 1 … D rows after rounds that accepted 0 … D rows, with decodes between them."""
    found: list[Case] = []
    for name in LAYERS:
        for label, draft, modes in (
            ("chain", CHAIN, STATE_MODES),
            ("tree", TREE, STATE_MODES),
            ("verify", CHAIN, (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)),
            ("ragged", CHAIN, (Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY)),
        )[: 4 if name in LARGE else 2]:
            geometry = geometry_of(name, draft, modes=modes, layers=1)
            found.append(case_of(name, _any_rows(geometry, len(found)), geometry, label))
    return found


def _any_rows(geometry: StateGeometry, seed: int) -> list[Round]:
    engine, most = StateEngine(geometry), geometry.draft.num_draft_tokens
    engine.join(6)
    made = [engine.extend((1, 4, 2, 9, 1, 3))]
    ragged, uniform = Mode.RAGGED_VERIFY in geometry.modes, Mode.VERIFY in geometry.modes
    for shift in range(most + 1):

        def leaf(n: int, one: Request, shift: int = shift) -> int:
            return min((n + shift) % (most + 1), one.rows) - 1

        kind = TREES[(shift + seed) % len(TREES)]
        if uniform:
            made.append(engine.verify(kind, leaf))
        if ragged:
            made.append(engine.verify_rows([(n * shift + seed) % (most + 1) for n in range(6)], kind, leaf))
        if shift % 2:
            made.append(engine.decode(8 if shift % 3 else None))
        if ragged and not uniform:
            made.append(engine.verify_rows([most] * 6, kind, leaf))
    return made


def fresh() -> list[Case]:
    """Return first forwards of requests on slots that hold anything, and on slots of requests that have left."""
    found: list[Case] = []
    for name in LAYERS:
        for draft in (CHAIN, TREE):
            geometry = geometry_of(name, draft, layers=1)
            for first in STATE_MODES:
                if draft is TREE and first in (Mode.EXTEND, Mode.DECODE):
                    continue  # Their rows are chains.
                rounds = [replace(one, junk=len(found)) for one in _fresh(geometry, first)]
                found.append(case_of(name, rounds, geometry, f"{first.value}-{'chain' if draft is CHAIN else 'tree'}"))
    return found


def _fresh(geometry: StateGeometry, first: Mode) -> list[Round]:
    engine = StateEngine(geometry)
    most = geometry.draft.num_draft_tokens

    def begin(turn: int) -> Round:
        last = _turning(lambda n, rows: (n + turn) % (rows + 1) - 1)
        made: dict[Mode, Callable[[], Round]] = {
            Mode.EXTEND: lambda: engine.extend((1, 2, 5, 3)[turn:] + (4,) * turn),
            Mode.DECODE: engine.decode,
            Mode.VERIFY: lambda: engine.verify(TREES[turn], last),
            Mode.RAGGED_VERIFY: lambda: engine.verify_rows((1, most, 2, 0), TREES[turn], last),
        }
        return made[first]()

    engine.join(4)
    made = [begin(turn) for turn in range(3)]
    for n in (3, 0):
        engine.leave(n)
    engine.join(2)
    made.append(begin(1))
    engine.preempt(0)
    return [*made, begin(2)]


CUTS = {
    "one": (70,),
    "tokens": (1, 1, 1, 1, 1, 1, 2, 1),
    "first": (1, 69),
    "last": (69, 1),
    "grid": (16, 32, 64, 16),
    "before": (15, 31, 63, 1, 64),
    "after": (17, 33, 65, 2, 63),
    "verify": (5, 5, 7, 5),
    "long": (130,),
    "longer": (200, 1, 7),
}
"""Chunks of a prompt: around the grids of 16, 32 and 64 rows of chunked kernels, and with the rows of a verify."""


LONG_PROMPT = 600
"""Rows of a prompt that is not cut."""


def chunks() -> list[Case]:
    """Return prompts in chunks, one prompt or several that are cut at other places."""
    found = []
    for name in LAYERS:
        limits = replace(LIMITS, max_extend_tokens=280)
        geometry = geometry_of(name, CHAIN, limits, layers=1)
        for label, cut in CUTS.items():
            if sum(cut) > 200 and name not in FEW:
                continue
            engine = StateEngine(geometry)
            engine.join(1)
            found.append(case_of(name, [engine.extend((rows,)) for rows in cut], geometry, label))
        if name in FEW:
            whole = replace(limits, max_extend_tokens=LONG_PROMPT, max_context_len=LONG_PROMPT + 64)
            engine = StateEngine(geometry_of(name, CHAIN, whole, layers=1))
            engine.join(1)
            found.append(case_of(name, [engine.extend((LONG_PROMPT,)), engine.decode()], engine.geometry, "whole"))
        dice = random.Random(f"chunks {name}")
        for label in ("mixed", "drawn"):
            engine = StateEngine(geometry)
            engine.join(4)
            sizes = (0, 1, 1, 2, 3, 5, 16, 33, 64)
            made = [
                engine.extend([dice.choice(sizes) if label == "mixed" else dice.randrange(40) for _ in range(4)], n % 2)
                for n in range(4)
            ]
            found.append(case_of(name, [*made, engine.decode()], geometry, label))
    return found


def rounded() -> list[Case]:
    """Return prompts in chunks of a layer that lets them round, with decodes and verifies after them."""
    found = []
    for name in ROUNDED:
        for label, draft, sizes in (
            ("long", TREE, (200,)),
            ("grid", CHAIN, (64, 16, 63, 1)),
            ("crowd", TREE, (3, 65, 0, 40, 1, 96)),
        ):
            limits = replace(LIMITS, max_extend_tokens=280)
            engine = StateEngine(geometry_of(name, draft, limits))
            engine.join(len(sizes) if label == "crowd" else 1)
            prompts = [sizes, sizes[::-1]] if label == "crowd" else [(rows,) for rows in sizes]
            made = [engine.extend(rows) for rows in prompts]
            last = _turning(lambda n, rows: rows - 1 - n % 3)
            made += [engine.decode(), engine.verify("chain" if draft is CHAIN else "random", last), engine.decode()]
            found.append(case_of(name, made, engine.geometry, label))
    return found


def padded() -> list[Case]:
    """Return batches with few live requests, or none, and RAGGED_VERIFY with rows after its requests."""
    found = []
    for name in LAYERS:
        for draft in (CHAIN, TREE)[: 1 + (name in FEW)]:
            geometry = geometry_of(name, draft)
            kind = "chain" if draft is CHAIN else "random"
            made = [
                state.verify(geometry, (7, 2, 0, 31, 5), tree=kind, padded=8, seed=1),
                state.verify(geometry, (9,), tree=kind, padded=8, seed=2),
                state.verify(geometry, (), tree=kind, padded=4, seed=3),
                state.decode(geometry, (3, 0), 8, seed=4),
                state.decode(geometry, (), 1, seed=5),
                state.verify_rows(geometry, (8, 1), (3, 2), tree=kind, seed=6),
                state.verify_rows(geometry, (8, 0), (0, 1), tree=kind, budget=12, seed=7),
                state.verify_rows(geometry, (), (), tree=kind, budget=12, seed=8),
                state.extend(geometry, (0, 5), (3, 0), padded=2, seed=9),
            ]
            found.append(case_of(name, made, geometry, "chain" if draft is CHAIN else "tree"))
    return found


def checkpoints() -> list[Case]:
    """Return rounds that reach multiples of the interval anywhere on their paths, or not, with slots lent or not."""
    found = []
    for name in LAYERS:
        for interval, rows, tree in ((4, 5, False), (4, 7, True), (3, 16, True), (8, 4, False), (16, 64, True)):
            if rows not in (5, 7) and name not in (LARGE if rows > MANY else FEW):
                continue
            limits = replace(_limits(rows), state_interval=interval)
            geometry = geometry_of(name, draft_of(rows, tree), limits, layers=1 if rows > CHECKED else LAYER_COUNT)
            label = f"every{interval}-{'tree' if tree else 'chain'}{rows}"
            found.append(case_of(name, _checkpoints(geometry), geometry, label))
    return found


def _checkpoints(geometry: StateGeometry) -> list[Round]:
    interval, most = geometry.limits.state_interval, geometry.draft.num_draft_tokens
    engine, count = StateEngine(geometry), 3 if most > MANY else 6
    engine.join(count)
    first = engine.extend([1 + n for n in range(count)])
    made = [first, engine.extend([interval - (1 + n) % interval for n in range(count)])]
    for turn in range(2):
        last = _turning(lambda n, rows, turn=turn: rows - 1 - (n * turn) % (rows + 1))  # type: ignore[misc]
        made.append(engine.verify("deep" if turn % 2 else "random", last, 8))
        made.append(
            engine.verify_rows([(n + turn) % (most + 1) for n in range(count)], "chain" if turn % 2 else "deep", last)
        )
        made.append(engine.decode())
        if turn == 1:
            engine.preempt(2)
            made.append(engine.extend([interval, 1, 3, 2, interval + 1, 0][:count]))
    return made
