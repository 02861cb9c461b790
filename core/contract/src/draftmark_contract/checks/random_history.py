"""Random sequences of forwards, compared with the oracle. A failing sequence is shrunk to the shortest that fails.

Every run has the same items: a fixed number per profile. A seed determines the sequences. It is 0 unless the
environment variable `SEED` sets another one, as `draftmark contract --seed` does. A failure prints its seed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry

from ..behaviour import Fixture, behaviour
from ..cases.histories import SEED, Draw, Engine, Step, profiles
from ..check import Case, ContractViolation, Refused
from ..failing_batch import Wrong

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.graph_harness import GraphHarness

SLOTS = 3
"""Number of items per profile."""
EXAMPLES = 4
"""Number of sequences that one item runs."""
LONGEST = 12
"""Maximum number of draws in one sequence."""
SHRINKS = 100
"""Number of runs that one item may use to shrink its failure."""
Value = tuple[Geometry, int]


def _cases() -> list[Case]:
    return [
        Case(f"{name}-{slot}", (geometry, number * SLOTS + slot))
        for number, (name, geometry) in enumerate(profiles().items())
        for slot in range(SLOTS)
    ]


@behaviour(
    Fixture.SUBJECT,
    cases=_cases,
    since=(1, 3),
    bugs=("sglang#10892", "sglang#31198", "vllm-ascend#5711", "vllm#26499", "sglang#28569"),
)
def equals_the_oracle(subject: BackendUnderTest, value: Value) -> None:
    """Random sequences of forwards, captures and replays match the oracle, in every mode and size.

    Between the forwards, requests join, grow, wait, move to other pages and leave.
    """
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st

    geometry, slot = value
    subject.require(geometry)
    base = int(os.environ.get(SEED, "0"))
    runs = _Runs(subject, geometry)
    small = st.integers(0, 11)
    draws = st.lists(st.tuples(st.integers(0, 8), small, small, small, small), min_size=4, max_size=LONGEST)

    @seed(base * 1000 + slot)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(draws)
    def run_history(history: list[Draw]) -> None:
        runs.run(history)

    try:
        run_history()
    except Refused:
        raise
    except Exception as error:
        raise runs.violation(error, f"--seed {base}") from error


class _Runs:
    """Runs sequences on the backend, and records the error of each failed sequence."""

    def __init__(self, subject: BackendUnderTest, geometry: Geometry) -> None:
        self.subject, self.geometry = subject, geometry
        self._failed: dict[str, Exception] = {}
        self._last: list[Step] = []
        self._left = SHRINKS

    def run(self, history: Sequence[Draw]) -> None:
        """Run one sequence on a fresh backend. After `SHRINKS` runs, raise only failures that were recorded before."""
        engine = Engine(self.geometry)
        steps = engine.steps(history)
        key = "\n".join(map(str, steps))
        if key in self._failed:
            self._last = steps
            raise self._failed[key]
        if self._failed:
            self._left -= 1
        if self._left < 0:
            return
        try:
            _run(self.subject, self.geometry, engine.num_pages, steps)
        except Exception as error:
            self._failed[key], self._last = error, steps
            raise

    def violation(self, error: Exception, seed: str) -> ContractViolation:
        """Return the failure as a `ContractViolation` that lists the steps of the sequence."""
        known = error.details if isinstance(error, ContractViolation) else {}
        wrong = error.wrong if isinstance(error, ContractViolation) else None
        place = replace(wrong, batch=known.get("batch")) if isinstance(wrong, Wrong) else None
        lines = [f"{number}. {step}" for number, step in enumerate(self._last, 1)]
        return ContractViolation(
            error.what if isinstance(error, ContractViolation) else f"a step raised {type(error).__name__}: {error}",
            batch="\n    ".join(
                [f"the shortest history that was found, with {seed}", *lines, str(known.get("batch", ""))]
            ),
            got=known.get("got"),
            expected=known.get("expected"),
            formula=known.get("formula", ""),
            bug=known.get("known from", "") or "sglang#10892, vllm-ascend#5711",
            remedy=f"run this item again with {seed}",
            wrong=place,
        )


def _run(subject: BackendUnderTest, geometry: Geometry, num_pages: int, steps: list[Step]) -> None:
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

    graphs = GraphHarness(Harness(subject, geometry, num_pages))
    for number, step in enumerate(steps):
        _step(graphs, step, number)


def _step(graphs: GraphHarness, step: Step, number: int) -> None:
    """Run one forward eagerly or by a graph. The graph is captured when it is first needed."""
    from draftmark.graphs import GraphKey

    harness, what = graphs.harness, f"the output of step {number + 1}"
    host = step.host if harness.bounded else "exact"
    if step.program is None:
        forward = harness.place(step.forward)
        batch = harness.load(forward, host, seed=number)
        if step.poison:
            harness.arena.poison()
        harness.assert_forward(forward, batch, what)
        return
    key = GraphKey(step.program, len(step.forward.requests))
    if key not in graphs.copies:
        graphs.capture(key, short=number % 2 == 1)
    if step.poison:
        harness.arena.poison()
    graphs.assert_replay(step.program, graphs.load(step.forward, seed=number, host=host), f"in step {number + 1}")
