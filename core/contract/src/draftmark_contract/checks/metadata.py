"""Checks of metadata: buffers are decoded by the declared layout and compared with the token history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import forward_cases, programs, representative_forwards
from ..cases.forwards import ForwardCase, ragged, uniform
from ..cases.geometries import all_shapes, wide
from ..check import Case

if TYPE_CHECKING:
    from ..harness.harness import Harness

HIGH_SLOT = 2**31
"""Slots from this number on do not fit int32."""


def _forwards() -> list[Case]:
    return forward_cases(*(shape.name for shape in all_shapes()))


def _wide() -> list[Case]:
    return [
        shape.case(forward, f"{forward.mode.value}{forward.step or ''}")
        for shape in wide()
        for forward in (_crowd if shape.name.startswith("crowd") else _long)(shape.geometry)
    ]


def _crowd(geometry: Geometry) -> list[ForwardCase]:
    many = range(290)
    return [
        uniform("crowd-decode", geometry, Mode.DECODE, [n * 7 % 40 for n in range(300)], 320, seed=1),
        ragged("crowd-extend", geometry, [n * 5 % 25 for n in many], [14 + n % 3 for n in many], padded=10),
    ]


def _long(geometry: Geometry) -> list[ForwardCase]:
    size = geometry.attention.page_size
    # The second and the third length end next to a page boundary.
    lens = (69_999, 4_097 // size * size + size - 1, 33_333 // size * size - 1)
    return [
        *(uniform(f"long-{mode.value}", geometry, mode, lens, 4, step=step) for mode, step in programs(geometry)),
        ragged("long-extend", geometry, (69_990, 2_049), (9, 3), padded=1),
    ]


def _high() -> list[Case]:
    found = []
    for shape in all_shapes():
        size = shape.geometry.attention.page_size
        if size > 1:
            forwards = representative_forwards(shape.geometry, first_page=HIGH_SLOT // size + 7)
            found += [shape.case(forward, forward.name) for forward in forwards]
    return found


@behaviour(
    Fixture.METADATA,
    cases=_forwards,
    bugs=("sglang#27545", "sglang#26628", "sglang#38187", "sglang#15469", "vllm#19321"),
)
def decodes_to_the_token_history(harness: Harness, forward: ForwardCase) -> None:
    """The backend's buffers name exactly the KV slots that each row attends to and writes."""
    _decodes(harness, forward)


@behaviour(Fixture.METADATA, cases=_wide, bugs=("vllm#47671", "sglang#27840"))
def survives_large_counts(harness: Harness, forward: ForwardCase) -> None:
    """Metadata is right for hundreds of requests and rows, thousands of pages, and lengths of more than 16 bits."""
    _decodes(harness, forward)


@behaviour(Fixture.METADATA, cases=_high, bugs=("vllm#47671", "flashinfer#3136"))
def survives_high_page_ids(harness: Harness, forward: ForwardCase) -> None:
    """Metadata is right for page ids with slots of `2**31` and more. The suite allocates no pool of that size."""
    _decodes(harness, forward)


def _decodes(harness: Harness, forward: ForwardCase) -> None:
    batch = harness.set(forward)
    harness.prepare(batch)
    harness.assert_metadata(forward, batch)
    harness.assert_guards(forward)
