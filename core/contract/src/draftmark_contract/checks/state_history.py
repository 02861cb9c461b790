"""Checks of recurrent state over time: random sequences of rounds, and 10,000 tokens of one request."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftmark.geometry import StateGeometry

from ..behaviour import Fixture, behaviour
from ..cases import state_histories as cases
from ..cases.histories import SEED
from ..cases.state import SINCE
from ..cases.state_rounds import Draw, StateEngine, drawn
from ..check import Refused
from .random_history import assert_history
from .state_graphs import replay_rounds

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.state_harness import StateHarness

LENGTH = 18
"""Draws of one sequence."""
Value = tuple[StateGeometry, int]


@behaviour(
    Fixture.SUBJECT,
    cases=cases.histories,
    since=SINCE,
    bugs=("vllm#39273", "flashinfer#3145", "vllm-metal#488", "vllm#51483"),
)
def equals_the_oracle(subject: BackendUnderTest, value: Value) -> None:
    """Random sequences of rounds and replays match the oracle after every round.

    Requests join, leave, are preempted and resumed from checkpoints, change slots, and their rounds are rewound.
    """
    geometry, slot = value
    subject.require(geometry)
    seed = os.environ.get(SEED, "0")
    history = drawn(random.Random(f"{seed} {slot} {geometry.state} {geometry.draft}"), LENGTH)

    def run(some: Sequence[Draw]) -> Exception | None:
        return _error(subject, geometry, some)

    assert_history(run, history, StateEngine(geometry, captures=True).rounds, f"--seed {seed}")


def _error(subject: BackendUnderTest, geometry: StateGeometry, history: Sequence[Draw]) -> Exception | None:
    """Run one sequence on a fresh open of the backend, and return its error or None."""
    from ..harness.graph_harness import GraphHarness
    from ..harness.state_harness import StateHarness

    engine = StateEngine(geometry, captures=True)
    rounds = engine.rounds(history)
    try:
        if rounds:
            replay_rounds(GraphHarness(StateHarness(subject, geometry, engine.num_slots)), rounds)
    except Refused:
        raise
    except Exception as error:
        return error
    return None


@behaviour(Fixture.STATE, cases=cases.drifts, since=SINCE, bugs=("sglang#28695", "sglang#33630", "sglang#40419"))
def does_not_drift(harness: StateHarness, geometry: StateGeometry) -> None:
    """After 10,000 tokens in rounds of 16 rows the state is that of 10,000 tokens one after another, in float64.

    The activations have a model's dtype, and the state float32. Some rounds keep only some of their rows.
    """
    from ..harness.state_drift import assert_no_drift

    assert_no_drift(harness, cases.TOKENS)
