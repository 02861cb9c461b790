"""Checks that two opened backends share no memory. They find state in module globals, closures and raw addresses.

The two backends are opened for one geometry, or for two geometries that differ in one field. The suite poisons the
memory of the first backend while the second backend runs. The memory must still be poison afterwards, and the first
backend must then give right outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import DRAFT_MODES, TARGET_MODES, DraftShape, Geometry
from draftmark.graphs import GraphKey, Program

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import programs
from ..cases.forwards import ForwardCase, ragged, uniform
from ..cases.geometries import behaviours, shapes
from ..cases.graph_rounds import program_cases, replays
from ..check import Case
from ..oracle.formulas import max_prefix, max_requests

if TYPE_CHECKING:
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

SINCE = (1, 3)
ALSO = ("all-modes", "all-few-graphs", "all-kv8", "target-window")
"""Shapes that these checks run in addition to the shapes that every check runs."""


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


def _same_lengths(geometry: Geometry) -> list[ForwardCase]:
    """Return forwards of every mode with sequence lengths that are valid in every geometry of this module."""
    last = dict(programs(geometry))
    found = [
        uniform(f"{mode.value}-{n}", geometry, mode, lens, min(4, max_requests(geometry)), step=step, seed=n)
        for mode, step in last.items()
        for n, lens in enumerate(((17, 3), (40, 33, 8)))
    ]
    return [*found, ragged("extend", geometry, (17, 0), (3, 5), seed=3)]


def _at_the_wall(geometry: Geometry) -> list[ForwardCase]:
    """Return forwards with a request at the context limit, in every mode. Geometries with other limits differ there."""
    last = dict(programs(geometry))
    lens = (max_prefix(geometry), 2)
    return [uniform(f"{mode.value}-wall", geometry, mode, lens, 2, step=step, seed=5) for mode, step in last.items()]


@behaviour(Fixture.GEOMETRY, cases=_geometries, since=SINCE, bugs=("flashinfer#4014", "vllm#48261", "sglang#27664"))
def of_two_opens_is_apart(harness: Harness, geometry: Geometry) -> None:
    """Two opens of one geometry are independent: each is right while the memory of the other is poisoned."""
    second = harness.fresh()
    _assert_all(harness, _same_lengths(geometry), "the first open's output")
    with harness.poisoned("while the geometry's second open ran"):
        _assert_all(second, _same_lengths(geometry)[::-1], "the output of a second open of the geometry")
    with second.poisoned("while the geometry's first open ran again"):
        _assert_all(harness, _same_lengths(geometry), "the first open's output, after a second one ran")


def _programs() -> list[Case]:
    return program_cases(shapes("all-modes"), SINCE)


@behaviour(Fixture.PROGRAM, cases=_programs, since=SINCE, bugs=("sglang#27664", "vllm#26499", "rtp-llm#1084"))
def of_two_captures_is_apart(graphs: GraphHarness, program: Program) -> None:
    """A program captured in two opens of a geometry replays right in each while the other's memory is poisoned."""
    geometry, second = graphs.harness.geometry, graphs.fresh()
    size = geometry.limits.capture_batch_sizes[-1]
    rounds = [forward for _, forward in replays(geometry, program) if len(forward.requests) == size][:2]
    for one in (graphs, second):
        one.capture(GraphKey(program, size))
    for forward in rounds:
        for one, other in ((second, graphs), (graphs, second)):
            with other.harness.poisoned("while the program was replayed in another open of the geometry"):
                one.assert_replay(program, one.load(forward, seed=3), "with the program captured in another open too")


def _twins() -> list[Case]:
    """Return pairs of geometries that differ in exactly one field."""
    known = behaviours()["all-modes"]
    base = replace(known, attention=replace(known.attention, num_qo_heads=2, num_kv_heads=1))

    def shaped(**change: object) -> Geometry:
        return replace(base, attention=replace(base.attention, **change))  # type: ignore[arg-type]

    others: dict[str, Callable[[], Geometry]] = {
        "scale": lambda: shaped(softmax_scale=0.3),
        "window": lambda: shaped(window_left=6),
        "cap": lambda: shaped(logits_soft_cap=2.0),
        "page": lambda: shaped(page_size=32),
        "heads": lambda: shaped(num_qo_heads=4),
        "kv-heads": lambda: shaped(num_kv_heads=2),
        "dim": lambda: shaped(head_dim=128),
        "dtype": lambda: shaped(q_dtype="float16", kv_dtype="float16"),
        "tree": lambda: replace(base, draft=DraftShape(topk=2, num_steps=4, num_draft_tokens=7)),
        "words": lambda: replace(base, draft=DraftShape(topk=3, num_steps=4, num_draft_tokens=40)),
        "longer-drafts": lambda: replace(base, draft=replace(base.draft, num_draft_tokens=24)),
        "overlap": lambda: replace(base, limits=replace(base.limits, overlap=True)),
        "limits": lambda: replace(base, limits=replace(base.limits, max_num_reqs=10, max_context_len=300)),
        "as-a-target": lambda: replace(base, modes=TARGET_MODES),
        "as-a-draft": lambda: replace(base, modes=DRAFT_MODES),
    }
    return [Case(name, (base, make()), SINCE) for name, make in others.items()]


@behaviour(Fixture.PAIR, cases=_twins, since=SINCE, bugs=("flashinfer#4014", "flashinfer#1028", "vllm#48261"))
def of_geometries_that_differ_is_apart(one: Harness, other: Harness) -> None:
    """Two geometries that differ in one field are independent: each is right while the other's memory is poisoned."""
    # First run each backend: a geometry field that the backend ignores fails here, and that is no memory fault.
    for harness in (one, other):
        _assert_all(harness, _same_lengths(harness.geometry)[:1], "the output, before another geometry is used")
    for first, second in ((one, other), (other, one)):
        forwards = [*_same_lengths(first.geometry), *_at_the_wall(first.geometry)]
        with second.poisoned("while another geometry's forwards ran"):
            _assert_all(first, forwards, "the output next to a geometry that differs in one field")


@behaviour(Fixture.PAIR, cases=_twins, since=SINCE, bugs=("flashinfer#4014", "vllm#48261", "sglang#27664"))
def of_two_plans_is_apart(one: Harness, other: Harness) -> None:
    """Two backends give right outputs when both are planned before either runs, as a target and its draft model are."""
    pairs = list(zip(_same_lengths(one.geometry), _same_lengths(other.geometry)[::-1], strict=False))
    for number, forwards in enumerate(pairs):
        runs = []
        for harness, forward in zip((one, other), forwards, strict=True):
            placed = harness.place(forward)
            batch = harness.load(placed, "exact", seed=number)
            harness.backend.plan(batch)
            runs.append((harness, placed, batch, harness.expected(placed)))
        for harness, placed, batch, expected in runs[:: 1 if number % 2 else -1]:
            harness.backend.write_metadata(batch)
            harness.layer(placed, batch)
            harness.assert_step(placed, batch, expected, "the output, after another backend's plan")


def _assert_all(harness: Harness, forwards: list[ForwardCase], what: str) -> None:
    for number, forward in enumerate(map(harness.place, forwards)):
        harness.assert_forward(forward, harness.load(forward, seed=number), what)
