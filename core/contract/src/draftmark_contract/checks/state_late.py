"""Checks of recurrent state on a late device: rounds are sent before the device has run the rounds before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases import state_graphs as cases
from ..cases.state import SINCE
from .state_graphs import captured

if TYPE_CHECKING:
    from ..cases.state_rounds import Round
    from ..harness.state_harness import StateHarness


@behaviour(Fixture.ROUNDS, cases=cases.in_flight, since=SINCE, bugs=("vllm#49620", "vllm#25279"))
def rounds_in_flight_are_their_own(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """Rounds are right when all of them are planned and sent before the device runs the first.

    Each continues the state of the round before, and a slot is given to another request while its last round waits.
    """
    from ..harness.graph_harness import GraphHarness
    from ..harness.late_harness import LateHarness

    late = LateHarness(GraphHarness(harness))
    late.stage([one.forward for one in rounds])
    late.send()
    late.assert_rounds()


@behaviour(Fixture.ROUNDS, cases=cases.in_flight, since=SINCE, bugs=("vllm#49620", "sglang#28034"))
def replays_in_flight_are_their_own(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """Replays and eager prompts are right when all of them are planned and sent before the device runs the first."""
    from ..harness.late_harness import LateHarness

    late = LateHarness(captured(harness, rounds))
    late.stage([one.forward for one in rounds])
    late.send(captured=True)
    late.assert_rounds()
