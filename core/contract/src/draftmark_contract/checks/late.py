"""A device that is late: rounds are planned and sent while it has not run those before, and the host goes on.

Inputs move from device memory to device memory, each round has pages of its own, and every round's metadata and
outputs are held against its own truth. On the host tier the device is a queue (`draftmark_contract.late_device`), on
the device tier it spins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Given, behaviour
from ..cases.geometries import shapes
from ..cases.late_rounds import in_flight
from ..check import Case

if TYPE_CHECKING:
    from draftmark.geometry import Geometry

    from ..harness.late_harness import LateHarness

ALSO = ("target-window", "draft-chain")
"""Shapes beside those that every check takes: their plans differ from step to step, and are alive together."""


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes()]


def _more() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(Given.LATE, cases=_geometries, since=(1, 3), bugs=("vllm#25279", "sglang#28034", "mini-sglang#103"))
def rounds_in_flight_are_their_own(late: LateHarness, geometry: Geometry) -> None:
    """Eager rounds of every mode, all of them planned and sent before the device has run one."""
    late.stage(in_flight(geometry))
    late.send()
    late.rounds_hold()


@behaviour(Given.LATE, cases=_more, since=(1, 3), bugs=("vllm#25279", "sglang#28034", "vllm-ascend#15719"))
def replays_in_flight_are_their_own(late: LateHarness, geometry: Geometry) -> None:
    """Replays of every program with eager prefills between, all planned and sent before the device has run one."""
    late.capture(in_flight(geometry))
    late.stage(in_flight(geometry))
    late.send(captured=True)
    late.rounds_hold()


@behaviour(Given.LATE, cases=_geometries, since=(1, 3), bugs=("sglang#40025", "sglang#32432"))
def plans_do_not_reach_a_round_half_run(late: LateHarness, geometry: Geometry) -> None:
    """The next round is planned while the device stands between a round's metadata and its attention."""
    rounds = in_flight(geometry)
    late.stage(rounds[: 2 * len(rounds) // 3])  # each meets one plan, the next
    late.send(halfway=True)
    late.rounds_hold()


@behaviour(Given.LATE, cases=_geometries, since=(1, 3), bugs=("vllm#25279", "TRT-LLM#16290"))
def rounds_outlive_their_backend(late: LateHarness, geometry: Geometry) -> None:
    """A backend is dropped with rounds under way, and its memory given out again: they come out as they were sent."""
    rounds = in_flight(geometry)
    third = len(rounds) // 3
    late.stage((*rounds[:third], *rounds[-third:]))
    late.send(reopen_after=third)
    late.rounds_hold()
