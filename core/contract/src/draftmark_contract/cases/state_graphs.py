"""Rounds over recurrent state that graphs are captured on and replayed with, and rounds in flight. No torch."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import StateGeometry
from draftmark.graphs import Program

from ..check import Case
from ..oracle.formulas import max_requests
from . import state
from .geometries import Shape
from .state import CHAIN, LIMITS, SINCE, TREE, geometry_of
from .state_rounds import TREES, Round, StateEngine

CAPTURED = replace(LIMITS, state_interval=6)
PROGRAMS = (Program.DECODE, Program.VERIFY, Program.RAGGED_VERIFY)


SHOWN = (("gdn", "tree"), ("mamba2", "chain"), ("conv", "tree"), ("kda", "chain"))
"""Layers and drafts that graphs run."""


def geometries(count: int = len(SHOWN)) -> list[tuple[str, StateGeometry]]:
    """Return the first geometries of `SHOWN`, by name."""
    drafts = {"chain": CHAIN, "tree": TREE}
    return [(f"{name}-{label}", geometry_of(name, drafts[label], CAPTURED)) for name, label in SHOWN[:count]]


def replayed() -> list[Case]:
    """Return, for each program, rounds of every captured size on slots that change from replay to replay.

    Requests join, leave, swap their slots and move between the replays.
    """
    found = []
    for name, geometry in geometries():
        for program in PROGRAMS:
            rounds = _replayed(geometry, program)
            found.append(Shape(name, geometry, SINCE).case(rounds, program.value.replace("_", "-")))
    return found


def _replayed(geometry: StateGeometry, program: Program) -> list[Round]:
    engine = StateEngine(geometry, captures=True)
    engine.join(4)
    made = [engine.extend((1, 5, 2, 9))]
    for turn in range(8):
        if turn == 2:
            engine.swap(0, 2)
        elif turn == 3:
            engine.leave(1)
            engine.move(0)
        elif turn == 4:
            engine.join(3)
        elif turn == 6:
            while len(engine.rows) > 1:
                engine.leave(0)
        made.append(_round(engine, program, turn))
    return made


def _round(engine: StateEngine, program: Program, turn: int) -> Round:
    """Make a round that is replayed, padded to a captured size."""
    geometry, choice = engine.geometry, state.any_leaf(turn)
    sizes = [size for size in geometry.limits.capture_batch_sizes if size >= len(engine.rows)]
    size, tree = sizes[-1 if turn % 2 else 0], TREES[1 + turn % 4]
    if program is Program.DECODE:
        return replace(engine.decode(size), program=program)
    if program is Program.VERIFY:
        return replace(engine.verify(tree, choice, size), program=program)
    most, budgets = geometry.draft.num_draft_tokens, geometry.limits.row_budgets
    rows = [(3 * n + turn) % (most + 1) for n in range(len(engine.rows))]
    return replace(engine.verify_rows(rows, tree, choice, budgets[turn % len(budgets)]), program=program)


def mixed() -> list[Case]:
    """Return rounds of all programs by turns, with eager prompts between them."""
    found = []
    for name, geometry in geometries():
        engine = StateEngine(geometry, captures=True)
        engine.join(3)
        made = [engine.extend((1, 5, 2))]
        for turn in range(9):
            made.append(_round(engine, PROGRAMS[turn % 3], turn))
            if turn == 4:
                engine.join(1)
                made.append(engine.extend((1, 1, 3, 7)))
        found.append(Shape(name, geometry, SINCE).case(made))
    return found


def captured(geometry: StateGeometry, program: Program, size: int, short: bool) -> Round:
    """Return the round on which a graph is captured: full, or one request."""
    engine = StateEngine(geometry, captures=True)
    engine.join(1 if short else max_requests(geometry))
    for row in engine.rows:
        row.length = 1 if short else 90
    if program is Program.RAGGED_VERIFY:
        rows = [geometry.draft.num_draft_tokens] * len(engine.rows)
        return engine.verify_rows(rows, "deep", state.any_leaf(1), size)
    engine.rows = engine.rows[:size]
    return engine.decode(size) if program is Program.DECODE else engine.verify("deep", state.any_leaf(1), size)


def in_flight() -> list[Case]:
    """Return rounds that are sent one after another, most of them continuing the state of earlier ones."""
    found = []
    for name, geometry in geometries(2):
        engine = StateEngine(geometry, captures=True)
        engine.join(4)
        made = [engine.extend((3, 1, 6, 2))]
        for turn in range(6):
            if turn == 3:
                engine.leave(2)
                engine.join(2)
            made.append(_round(engine, PROGRAMS[turn % 3], turn))
        found.append(Shape(name, geometry, SINCE).case(made))
    return found
