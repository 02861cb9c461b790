"""Checks of what follows a sleep, a failed capture and a failed forward, on one open backend and in every mode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.graphs import GraphKey, Program

from ..behaviour import Fixture, behaviour
from ..cases.forwards import ForwardCase
from ..cases.geometries import ONE_KV_HEAD, PAGE128
from ..cases.graph_rounds import MODES, captured, key_of, replays, sizes_of
from ..cases.histories import CALLS, Failure
from ..cases.turns import forward_of
from ..check import Case

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.graph_harness import GraphHarness

SINCE = (1, 5)
LIMITS = Limits(
    max_num_reqs=3, max_context_len=140, max_extend_tokens=24, capture_batch_sizes=(1, 4), row_budgets=(4, 9)
)
DRAFT = DraftShape(topk=2, num_steps=3, num_draft_tokens=3, block_size=4)
ONE_HEAD_PAGE128 = replace(PAGE128, num_qo_heads=2, num_kv_heads=1)
FAILURES = (
    *(Failure(call, operator) for operator in (None, 0, 2) for call in range(len(CALLS))),
    Failure(CALLS.index("attend"), refused=True),
)
"""Failures of a forward: the engine fails after each call, an operator of each call raises, or attend refuses."""
OF_A_CAPTURE = tuple(one for one in FAILURES if CALLS[one.call] != "plan" and not one.operator and not one.refused)
"""Failures of a captured step. It does not contain plan."""
LIVES = 2
"""Number of times that all graphs are dropped and captured again."""


def _geometry(mode: Mode, attention: AttentionShape = ONE_HEAD_PAGE128) -> Geometry:
    return Geometry.create(attention, LIMITS, DRAFT, modes=tuple(dict.fromkeys((Mode.EXTEND, mode))))


def _modes() -> list[Case]:
    window = replace(ONE_KV_HEAD, window_left=20)
    found = [Case(f"page128-{mode.value}", _geometry(mode), SINCE) for mode in Mode]
    return [*found, *(Case(f"window-{mode.value}", _geometry(mode, window), SINCE) for mode in Mode)]


def _programs() -> list[Case]:
    return [Case(f"page128-{program.value}", (_geometry(mode), program), SINCE) for program, mode in MODES.items()]


@behaviour(Fixture.SUBJECT, cases=_programs, since=SINCE, bugs=("sglang#27664", "vllm#53821"))
def of_a_graph_is_right(subject: BackendUnderTest, value: tuple[Geometry, Program]) -> None:
    """After all graphs are dropped, the same open backend captures them again, and they replay right.

    The engine slept: it dropped the graph state with its memory, and other data fills the arena.
    """
    geometry, program = value
    graphs = _graphs(subject, geometry)
    for life in range(1 + LIVES):
        sizes = sizes_of(geometry, program)
        for size in sizes if life % 2 else sizes[::-1]:
            graphs.capture(GraphKey(program, size), short=life % 2 == 0)
        _assert_replays(graphs, geometry, program, f"in life {life + 1} of the graphs")
        graphs.sleep()


@behaviour(Fixture.SUBJECT, cases=_programs, since=SINCE, bugs=("vllm#53658", "sglang#3987"))
def of_a_capture_is_right(subject: BackendUnderTest, value: tuple[Geometry, Program]) -> None:
    """A capture that failed can be repeated, and its graph then replays right.

    The step raises after one of its calls, or at an operator of a call.
    """
    geometry, program = value
    graphs, size = _graphs(subject, geometry), sizes_of(geometry, program)[-1]
    for number, failure in enumerate(OF_A_CAPTURE):
        key = GraphKey(program, size)
        graphs.fail_to_capture(key, failure, short=number % 2 == 1)
        graphs.capture(key, short=number % 4 > 1)
        loaded = graphs.load(_replayed(geometry, program)[number % 2], seed=number)
        graphs.assert_replay(program, loaded, f"after a capture that {failure}")
        graphs.sleep()


@behaviour(Fixture.SUBJECT, cases=_modes, since=SINCE, bugs=("vllm#51171", "sglang#29413"))
def of_a_forward_is_right(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A forward that fails in any call has no effect on later forwards: the same one repeated, and another one.

    The forward raises after one of its calls, or at an operator of a call.
    """
    from ..harness.harness import Harness

    dice, mode = random.Random(f"failures {geometry}"), geometry.modes[-1]
    short, long = LIMITS.max_context_len // 10, LIMITS.max_context_len
    drawn = [
        [forward_of(geometry, dice, mode, most) for most in ((short, long), (long, short))[number % 2]]
        for number in range(len(FAILURES))
    ]
    harness = Harness(subject, geometry, max(forward.num_pages for pair in drawn for forward in pair))
    for number, (failure, pair) in enumerate(zip(FAILURES, drawn, strict=True)):
        first, second = map(harness.place, pair)
        host = ("exact", harness.host)[number // 2 % 2]
        harness.fail(first, harness.load(first, host, seed=number), failure)
        for after in (first, second) if number % 3 else (second, first):
            what = f"the output after a forward that {failure}"
            harness.assert_forward(after, harness.load(after, host, seed=number + 100), what)


def _graphs(subject: BackendUnderTest, geometry: Geometry) -> GraphHarness:
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

    program = next(program for program, mode in MODES.items() if mode in geometry.modes and mode is not Mode.EXTEND)
    most = [captured(geometry, program, size) for size in sizes_of(geometry, program)]
    most += [forward for _, forward in replays(geometry, program)]
    return GraphHarness(Harness(subject, geometry, max(forward.num_pages for forward in most)))


def _replayed(geometry: Geometry, program: Program) -> Sequence[ForwardCase]:
    """Return a full and long batch of a program's largest graph, and a short one with padding."""
    size = sizes_of(geometry, program)[-1]
    found = [forward for _, forward in replays(geometry, program) if key_of(forward).batch_size == size]
    return found[0], found[1]


def _assert_replays(graphs: GraphHarness, geometry: Geometry, program: Program, what: str) -> None:
    """Replay both batches of the largest graph, and one of the smallest."""
    small = next(
        one for _, one in replays(geometry, program) if key_of(one).batch_size == sizes_of(geometry, program)[0]
    )
    for number, forward in enumerate((*_replayed(geometry, program), small)):
        graphs.assert_replay(program, graphs.load(forward, seed=number), what)
