"""Host lengths: what a backend declares to need is enough, and a bound is not a length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry
from draftmark.metadata import HostLengthsNeed

from ..check import Case
from ..scenarios.scenes import turn_cases
from ..scenarios.shapes import all_shapes
from ..scenarios.tiers import behaviour
from ..scenarios.turns import Turn

if TYPE_CHECKING:
    from ..subject import Subject

ALSO = ("target-overlap", "target-page32-long")
"""Shapes beside those that every check takes."""
KINDS = ("unknown", "upper_bound", "mixed_bound", "tight_bound", "exact")
SUFFICIENT = {
    HostLengthsNeed.NONE: KINDS,
    HostLengthsNeed.UPPER_BOUND: KINDS,
    HostLengthsNeed.EXACT: ("exact",),
}
"""Unknown always gives a bound too: the limit."""


def _turns() -> list[Case]:
    return turn_cases(*ALSO)


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in all_shapes()]


@behaviour(cases=_turns, bugs=("sglang#26738", "sglang#26753", "sglang#30217", "vllm#43991", "vllm#44492"))
def of_any_kind_give_one_result(subject: Subject, turn: Turn) -> None:
    """Exact lengths, loose bounds and no lengths at all lead to the same metadata and outputs, in any order."""
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place
    from ..scenarios.stage import host_lengths

    rig = Rig(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    kinds = SUFFICIENT[subject.backend.host_lengths(turn.geometry)]
    told = {host_lengths(turn, kind): kind for kind in reversed(kinds)}  # one kind where two say the same
    for kind in reversed(told.values()):
        rig.arena.poison()
        verify.turn_holds(rig, turn, rig.load(turn, kind), f"with {kind} host lengths the output")


@behaviour(cases=_geometries)
def exact_excludes_overlap(subject: Subject, geometry: Geometry) -> None:
    """A backend that needs exact lengths refuses a geometry with overlap, and no other for that reason."""
    from draftmark.errors import BackendRefusal

    from ..check import ContractViolation

    subject.require(geometry)
    overlapped = replace(geometry, limits=replace(geometry.limits, overlap=True))
    need = subject.backend.host_lengths(geometry)
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
