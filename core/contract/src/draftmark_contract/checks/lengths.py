"""Host lengths: what a backend declares to need is enough, and a bound is not a length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry
from draftmark.requirements import HostLengthsNeed

from ..behaviour import behaviour
from ..cases.forward_sets import forward_cases
from ..cases.forwards import ForwardCase
from ..cases.geometries import all_shapes
from ..check import Case

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

ALSO = ("target-overlap", "target-page32-long")
"""Shapes beside those that every check takes."""
KINDS = ("unknown", "upper_bound", "mixed_bound", "tight_bound", "exact")
SUFFICIENT = {
    HostLengthsNeed.NONE: KINDS,
    HostLengthsNeed.UPPER_BOUND: KINDS,
    HostLengthsNeed.EXACT: ("exact",),
}
"""Unknown always gives a bound too: the limit."""


def _forwards() -> list[Case]:
    return forward_cases(*ALSO)


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in all_shapes()]


@behaviour(cases=_forwards, bugs=("sglang#26738", "sglang#26753", "sglang#30217", "vllm#43991", "vllm#44492"))
def of_any_kind_give_one_result(subject: BackendUnderTest, forward: ForwardCase) -> None:
    """Exact lengths, loose bounds and no lengths at all lead to the same metadata and outputs, in any order."""
    from ..harness import expect as verify
    from ..harness.harness import Harness, place
    from ..harness.tensors import host_lengths

    harness = Harness(subject, forward.geometry, forward.num_pages)
    forward = place(harness, forward)
    kinds = SUFFICIENT[subject.backend.requirements(forward.geometry).host_lengths]
    told = {host_lengths(forward, kind): kind for kind in reversed(kinds)}  # one kind where two say the same
    for kind in reversed(told.values()):
        harness.arena.poison()
        verify.forward_holds(harness, forward, harness.load(forward, kind), f"with {kind} host lengths the output")


@behaviour(cases=_geometries)
def exact_excludes_overlap(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A backend that needs exact lengths refuses a geometry with overlap, and no other for that reason."""
    from draftmark.errors import BackendRefusal

    from ..check import ContractViolation

    subject.require(geometry)
    overlapped = replace(geometry, limits=replace(geometry.limits, overlap=True))
    need = subject.backend.requirements(geometry).host_lengths
    try:
        subject.backend.require(overlapped)
    except BackendRefusal:
        return
    if need is HostLengthsNeed.EXACT:
        raise ContractViolation(
            "a backend that needs exact host lengths serves a geometry with overlap",
            batch=overlapped,
            got="no refusal",
            expected="a refusal with the remedy overlap=False",
        )
