"""Host lengths: what a backend declares to need is enough, and a bound is not a length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Mode
from draftmark.requirements import HostLengthsNeed

from ..behaviour import Given, behaviour
from ..cases.forward_sets import forward_cases
from ..cases.forwards import ForwardCase
from ..cases.production import crowd, crowds
from ..check import Case

if TYPE_CHECKING:
    from ..harness.harness import Harness

ALSO = ("target-overlap", "target-page32-long")
"""Shapes beside those that every check takes."""
KINDS = ("unknown", "upper_bound", "mixed_bound", "tight_bound", "exact")
SUFFICIENT = {
    HostLengthsNeed.NONE: KINDS,
    HostLengthsNeed.UPPER_BOUND: KINDS,
    HostLengthsNeed.RECOVERED: KINDS,
    HostLengthsNeed.EXACT: ("exact",),
}
"""Unknown always gives a bound too: the limit."""


def _forwards() -> list[Case]:
    """A bound of a long request may lie behind the next split of the keys."""
    shapes = [shape for shape in crowds() if shape.name in ("crowd", "crowd-page128")]
    crowded = [
        shape.case(crowd(shape.geometry, mode, 0), mode.value)
        for shape in shapes
        for mode in (Mode.DECODE, Mode.VERIFY)
    ]
    return [*forward_cases(*ALSO), *crowded]


@behaviour(
    Given.FORWARD,
    cases=_forwards,
    bugs=("sglang#26738", "sglang#26753", "sglang#30217", "vllm#43991", "vllm#44492"),
)
def of_any_kind_give_one_result(harness: Harness, forward: ForwardCase) -> None:
    """Exact lengths, loose bounds and no lengths at all lead to the same metadata and outputs, in any order."""
    told = set()
    for kind in SUFFICIENT[harness.subject.backend.requirements(forward.geometry).host_lengths]:
        batch = harness.load(forward, kind)
        if batch.host not in told:  # one kind where two say the same
            told.add(batch.host)
            harness.arena.poison()
            harness.forward_holds(forward, batch, f"with {kind} host lengths the output")
