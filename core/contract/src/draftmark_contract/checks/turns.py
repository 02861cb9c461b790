"""Checks of three open geometries by turns: a model's full and window layers, and a draft model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry
from draftmark.graphs import Program

from ..behaviour import Fixture, behaviour
from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import captured, key_of, programs_of, replays, sizes_of
from ..cases.turns import ROUNDS, SINCE, Turns, as_drafted, forward_of, many, orders, shown, triples
from ..check import ContractViolation

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.turns_harness import TurnsHarness

BUGS = ("vllm#54374", "vllm#48261", "flashinfer#4014")


@behaviour(Fixture.SUBJECT, cases=triples, since=SINCE, bugs=BUGS)
def of_three_geometries_are_right(subject: BackendUnderTest, value: Turns) -> None:
    """Three open geometries give right results while the calls of their forwards interleave in any order.

    Each forward keeps the order of its own calls. Two of them are layers of one model and may share a batch. The third
    is a draft model of another shape.
    """
    dice = value.dice
    rounds = [_drawn(value, dice) for _ in range(2 * ROUNDS)]
    turns = _opened(subject, value, rounds)
    for number, (forwards, order) in enumerate(zip(rounds, orders(_counts(subject, 4), dice), strict=False)):
        if dice.randrange(3) == 0:
            for harness in turns.harnesses:
                harness.arena.poison()
        with _order_in_message(order):
            loaded = turns.load(forwards, number, dice.choice((None, "exact")))
            turns.run(loaded, order)
            turns.assert_turns(loaded, f"in round {number}")


@behaviour(Fixture.SUBJECT, cases=triples, since=SINCE, bugs=BUGS)
def of_three_geometries_are_right_in_a_graph(subject: BackendUnderTest, value: Turns) -> None:
    """Graphs with interleaved calls of three open geometries replay right between eager forwards of all three."""
    dice = value.dice
    joint = [_joint(value, program, dice) for program in programs_of(value.geometries[0])]
    eager = [_drawn(value, dice) for _ in joint]
    turns = _opened(subject, value, [*(forwards for rounds in joint for forwards in rounds), *eager])
    drawn = [order for order, _ in zip(orders(_counts(subject, 3), dice), joint, strict=False)]
    for rounds, order in zip(joint, drawn, strict=True):
        with _order_in_message(order):
            turns.capture(key_of(rounds[0][0]), turns.load(rounds[0], 0, turns.capture_host), order)
    for number in range(1, len(joint[0])):
        for rounds, between, order in zip(joint, eager, drawn, strict=True):
            key = key_of(rounds[0][0])
            with _order_in_message(order):
                loaded = turns.load(rounds[number], number)
                turns.replay(key, loaded)
                turns.assert_turns(loaded, f"in replay {number} of {key}")
            if number == 1:
                whole = [n for n in range(len(between)) for _ in range(_counts(subject, 4)[n])]
                loaded = turns.load(between, number)
                turns.run(loaded, whole)
                turns.assert_turns(loaded, "in an eager forward between two replays")


@behaviour(Fixture.SUBJECT, cases=many, since=SINCE, bugs=BUGS)
def of_many_geometries_are_right(subject: BackendUnderTest, forwards: Sequence[ForwardCase]) -> None:
    """Twenty geometries are open at one time, and each keeps its plan, metadata and settings for itself."""
    from ..harness.harness import Harness

    harnesses = [Harness(subject, one.geometry, one.num_pages) for one in forwards]
    for number in range(2):
        loaded = []
        for harness, forward in zip(harnesses, forwards, strict=True):
            placed = harness.place(forward)
            batch = harness.load(placed, seed=number)
            harness.backend.plan(batch)
            loaded.append((harness, placed, batch, harness.expected(placed)))
        for harness, _, batch, _ in reversed(loaded):
            harness.backend.write_metadata(batch)
        for harness, placed, batch, expected in loaded[:: 1 if number else -1]:
            harness.layer(placed, batch)
            harness.assert_step(placed, batch, expected, f"the output with {len(loaded)} geometries open")


def _counts(subject: BackendUnderTest, calls: int) -> list[int]:
    """Return the number of calls of each geometry: without kernels, write_kv and attend do not run."""
    return [calls if subject.kernels else calls - 2] * 3


def _drawn(value: Turns, dice: random.Random) -> list[ForwardCase]:
    """Return a forward of each geometry. Half of the time the layers of the model have one batch."""
    forwards = [forward_of(geometry, dice) for geometry in value.geometries]
    if dice.randrange(2):
        forwards[1] = replace(forwards[0], geometry=value.geometries[1])
    return forwards


def _joint(value: Turns, program: Program, dice: random.Random) -> list[list[ForwardCase]]:
    """Return rounds of one graph: a program of both layers of the model, and a drawn program of the draft model."""
    full, window, draft = value.geometries
    own = _rounds(full, program)
    other = _rounds(draft, dice.choice(programs_of(draft)))
    return [[one, replace(one, geometry=window), more] for one, more in zip(own, other, strict=False)][:ROUNDS]


def _rounds(geometry: Geometry, program: Program) -> list[ForwardCase]:
    """Return the capture batch of a program's largest graph, and batches that it replays."""
    size = sizes_of(geometry, program)[-1]
    first = captured(geometry, program, size)
    again = [one for _, one in replays(geometry, program)]
    return [as_drafted(one) for one in (first, *again) if key_of(one) == key_of(first)]


def _opened(subject: BackendUnderTest, value: Turns, rounds: Sequence[Sequence[ForwardCase]]) -> TurnsHarness:
    from ..harness.turns_harness import TurnsHarness

    most = max(forward.num_pages for forwards in rounds for forward in forwards)
    return TurnsHarness(subject, value.geometries, most)


@contextmanager
def _order_in_message(order: Sequence[int]) -> Iterator[None]:
    """Add the order of the calls to the batch of a violation, and to another error as a note."""
    try:
        yield
    except ContractViolation as violation:
        violation.details["batch"] = f"{violation.details['batch']}\n      {shown(order)}"
        raise
    except Exception as error:  # A backend can raise any exception.
        error.add_note(shown(order))
        raise
