"""Checks with a late device: the host plans and sends rounds before the device has run the earlier rounds.

Inputs are copied from device memory to device memory, and each round has its own pages. The metadata and outputs of
every round are compared with the truth of that round. On the host tier the device is a queue
(`draftmark_contract.late_device`). On the device tier a kernel spins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.geometries import shapes
from ..cases.late_rounds import in_flight
from ..check import Case

if TYPE_CHECKING:
    from draftmark.geometry import Geometry

    from ..harness.late_harness import LateHarness

ALSO = ("target-window", "draft-chain")
"""More shapes than every check runs. Their plans differ from draft step to draft step, and all are in use at once."""


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes()]


def _more() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(Fixture.LATE_DEVICE, cases=_geometries, since=(1, 3), bugs=("vllm#25279", "sglang#28034", "mini-sglang#103"))
def rounds_in_flight_are_their_own(late: LateHarness, geometry: Geometry) -> None:
    """Eager rounds of every mode are right when all of them are planned and sent before the device runs the first."""
    late.stage(in_flight(geometry))
    late.send()
    late.assert_rounds()


@behaviour(Fixture.LATE_DEVICE, cases=_more, since=(1, 3), bugs=("vllm#25279", "sglang#28034", "vllm-ascend#15719"))
def replays_in_flight_are_their_own(late: LateHarness, geometry: Geometry) -> None:
    """Replays and eager prefills are right when all of them are planned and sent before the device runs the first."""
    late.capture(in_flight(geometry))
    late.stage(in_flight(geometry))
    late.send(captured=True)
    late.assert_rounds()


@behaviour(Fixture.LATE_DEVICE, cases=_geometries, since=(1, 3), bugs=("sglang#40025", "sglang#32432"))
def plans_do_not_reach_a_round_half_run(late: LateHarness, geometry: Geometry) -> None:
    """Planning the next round changes nothing for a round that the device has run only up to its attention.

    The device stops between the metadata and the attention of a round while the host plans the next round.
    """
    rounds = in_flight(geometry)
    # Each round is followed by exactly one plan, so two thirds of the rounds are enough here.
    late.stage(rounds[: 2 * len(rounds) // 3])
    late.send(halfway=True)
    late.assert_rounds()


@behaviour(Fixture.LATE_DEVICE, cases=_geometries, since=(1, 3), bugs=("vllm#25279", "TRT-LLM#16290"))
def rounds_outlive_their_backend(late: LateHarness, geometry: Geometry) -> None:
    """Rounds in flight stay right after their backend is dropped and its memory is allocated again."""
    rounds = in_flight(geometry)
    third = len(rounds) // 3
    late.stage((*rounds[:third], *rounds[-third:]))
    late.send(reopen_after=third)
    late.assert_rounds()
