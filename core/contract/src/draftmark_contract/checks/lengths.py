"""Checks of host lengths: the declared need suffices, and the backend never uses an upper bound as the exact length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Mode

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import forward_cases
from ..cases.forwards import ForwardCase
from ..cases.production import crowd, crowds
from ..check import Case

if TYPE_CHECKING:
    from ..harness.harness import Harness

ALSO = ("target-overlap", "target-page32-long")
"""Shapes that these checks run in addition to the shapes that every check runs."""
SAME_LENGTHS = ("-edges-unused", "-edges-chain", "-shared")
"""Ends of the names of forwards that have the lengths of another forward."""


def _forwards() -> list[Case]:
    """Return forwards of all lengths, and cases with long requests.

    The upper bounds of long requests give more split-KV splits than their exact lengths do. Some kinds of trees, and
    shared pages, change no length: these forwards are left out.
    """
    shapes = [shape for shape in crowds() if shape.name in ("crowd", "crowd-page128")]
    crowded = [
        shape.case(crowd(shape.geometry, mode, 0), mode.value)
        for shape in shapes
        for mode in (Mode.DECODE, Mode.VERIFY)
    ]
    return [*(one for one in forward_cases(*ALSO) if not one.id.endswith(SAME_LENGTHS)), *crowded]


@behaviour(
    Fixture.FORWARD,
    cases=_forwards,
    bugs=("sglang#26738", "sglang#26753", "sglang#30217", "vllm#43991", "vllm#44492"),
)
def of_any_kind_give_one_result(harness: Harness, forward: ForwardCase) -> None:
    """Exact host lengths, upper bounds and unknown lengths give the same metadata and outputs.

    A backend that declares a need for exact lengths receives only exact lengths.
    """
    tested = set()
    for kind in harness.host_kinds:
        batch = harness.load(forward, kind)
        if batch.host not in tested:  # Two kinds of host lengths can give equal values; run equal values only once.
            tested.add(batch.host)
            harness.poison()
            harness.assert_forward(forward, batch, f"with {kind} host lengths the output")
