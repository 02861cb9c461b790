"""Checks that leftovers in the buffers do not matter: sequences of forwards on one arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import programs, representative_forwards, spanning_forwards
from ..cases.forwards import ForwardCase, ragged, uniform
from ..cases.geometries import EVERYWHERE, all_shapes, shapes
from ..cases.production import few_requests
from ..check import Case
from ..oracle.formulas import max_requests

if TYPE_CHECKING:
    from ..harness.harness import Harness

ALSO = (
    "target-window",
    "draft-window",
    "target-page1-words2",
    "target-page32-long",
    "all-modes",
    "all-few-graphs",
    "all-kv8",
    "target-topk1",
)
"""Shapes that these checks run in addition to the shapes that every check runs."""
ONLY_MIXED = ("all-modes", "all-kv8", "target-topk1")
"""Shapes that run only sequences of all modes; other shapes run sequences of one mode."""
PLACES = (*EVERYWHERE, "target-page1-words2")
"""Shapes in which requests move to other pages."""
SINCE = (1, 3)
LIFE = 300
"""Number of steps on one arena."""
LOOKED_AT = frozenset((64, *range(127, 134), *range(255, 262), LIFE))
"""Steps with a checked output: every mode after 128 and 256 steps. An interpreter is too slow to check every step."""
LONG_LIVED = ("small", "all-few-graphs")
"""The core profile, and a shape with every mode. Only two shapes, because hundreds of steps are slow."""


def _sequences() -> list[Case]:
    found = []
    for shape in shapes(*ALSO):
        for mode, step in programs(shape.geometry):
            label = f"{mode.value}{step or ''}"
            one = f"{shape.name}-{label}", shape.geometry, mode, step
            if shape.name not in ONLY_MIXED:
                found.append(shape.case(_shrink_and_grow(*one), f"{label}-shrink-grow"))
            if shape.name in PLACES:
                found.append(shape.case(_other_places(*one), f"{label}-places"))
        if Mode.EXTEND in shape.geometry.modes:
            found.append(shape.case(_same_totals(shape.geometry), "extend-same-totals"))
        forwards = representative_forwards(shape.geometry) if shape.brief else spanning_forwards(shape.geometry)
        found.append(shape.case(forwards, "modes"))
        # Backwards, and in three passes, so that most forwards follow others than in the first order.
        found.append(shape.case(forwards[::-3] + forwards[-2::-3] + forwards[-3::-3], "modes-shuffled"))
    return found


def _long_lives() -> list[Case]:
    wanted = [shape for shape in all_shapes() if shape.name in LONG_LIVED]
    return [Case(f"steps{LIFE}-{one.name}", few_requests(one.geometry, (17, 3)), SINCE) for one in wanted]


@behaviour(Fixture.FORWARDS, cases=_long_lives, since=SINCE)
def an_arena_serves_for_long(harness: Harness, forwards: list[ForwardCase]) -> None:
    """After hundreds of steps on one arena a step is still right, so no 8-bit counter overflows."""
    for number in range(1, LIFE + 1):
        forward = forwards[number % len(forwards)]
        if number in LOOKED_AT:
            harness.assert_forward(forward, harness.load(forward, seed=number), f"the output of step {number}")
        else:
            harness.prepare(harness.set(forward))


def _shrink_and_grow(label: str, geometry: Geometry, mode: Mode, step: int) -> list[ForwardCase]:
    """Return a sequence for one mode: short forwards, long ones, few short requests, then many, with changing trees."""
    wall, most = geometry.limits.max_context_len, geometry.limits.max_num_reqs
    largest = max_requests(geometry)
    plans = [
        ((2,) * most, largest, "random"),
        ((wall,) * most, largest, "random"),
        ((1, 3), 4, "unused"),
        ((0,), 1, "chain"),
        (tuple(range(most)), largest, "star"),
        ((wall - 1, 0, 2), largest, "chain"),
        ((5,), largest, "random"),
    ]
    return [
        uniform(f"{label}-{i}", geometry, mode, lens, padded, step=step, tree=tree, seed=i)
        for i, (lens, padded, tree) in enumerate(plans)
    ]


def _other_places(label: str, geometry: Geometry, mode: Mode, step: int) -> list[ForwardCase]:
    """Return forwards with swapped requests, or with new pages after a common first page. Total sizes stay equal."""
    size, largest = geometry.attention.page_size, max_requests(geometry)
    long = min(2 * size + 3, geometry.limits.max_context_len)

    def forward(lens: tuple[int, ...], seed: int) -> ForwardCase:
        return uniform(f"{label}-places-{lens[0]}", geometry, mode, lens, largest, step=step, seed=seed)

    first, swapped = forward((long, 1), 1), forward((1, long), 2)
    return [first, swapped, first.moved_but_first(), first, swapped.moved_but_first(), swapped, first]


def _same_totals(geometry: Geometry) -> list[ForwardCase]:
    """Return prefills with equal totals, but other prefixes and other splits of the rows over the requests."""
    rows = min(8, geometry.limits.max_extend_tokens)
    found = []
    for number, first in enumerate((rows - 3, 1, rows, 2, rows - 3)):
        lens = (number % 3, 3 * number + 2)
        found.append(ragged(f"extend-same-{number}", geometry, lens, (first, rows - first), seed=number))
    return found


@behaviour(
    Fixture.FORWARDS,
    cases=_sequences,
    bugs=("sglang#10892", "vllm#36611", "flashinfer#1028", "sglang#31198", "vllm#41841"),
)
def equals_a_fresh_state(harness: Harness, forwards: list[ForwardCase]) -> None:
    """On dirty buffers a forward gives a right output, and the same metadata as on a fresh arena.

    The forwards before it grow, shrink, and change mode, draft step and tree.
    """
    kinds = harness.host_kinds[::-1]
    for number, forward in enumerate(forwards):
        what, kind = f"the output after {number} other forwards", kinds[number // 2 % len(kinds)]
        # The output is compared with a float64 reference, which is stricter than comparing two runs of the backend.
        harness.assert_forward(forward, harness.load(forward, kind), what)
        harness.assert_metadata_is_fresh(forward, number)
