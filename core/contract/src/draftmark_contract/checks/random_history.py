"""Random sequences of forwards, compared with the oracle. A failing sequence is shrunk to the shortest that fails.

Every run has the same items: a fixed number per profile. A seed determines the sequences. It is 0 unless the
environment variable `SEED` sets another one, as `draftmark contract --seed` does. A failure prints its seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode

from ..behaviour import Fixture, behaviour
from ..cases.graph_rounds import key_of
from ..cases.histories import SEED, Draw, Engine, Step, drawn
from ..cases.history_profiles import profiles
from ..check import Case, ContractViolation, Refused, Wrong

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

SLOTS = 3
"""Number of items per profile of core modes. Profiles of all modes have one less, with longer sequences."""
EXAMPLES = 2
"""Number of sequences that one item runs."""
LENGTH, LONG = 12, 16
"""Number of draws in one sequence: of core modes, and of all modes."""
SHRINKS = 100
"""Number of runs that one item may use to shrink its failure."""
Value = tuple[Geometry, int]


def _cases() -> list[Case]:
    return [
        Case(f"{name}-{slot}", (geometry, number * SLOTS + slot), (1, 5) if _has_all_modes(geometry) else (1, 3))
        for number, (name, geometry) in enumerate(profiles().items())
        for slot in range(SLOTS - _has_all_modes(geometry))
    ]


@behaviour(
    Fixture.SUBJECT,
    cases=_cases,
    since=(1, 3),
    bugs=("sglang#10892", "sglang#31198", "vllm-ascend#5711", "vllm#26499", "sglang#28569"),
)
def equals_the_oracle(subject: BackendUnderTest, value: Value) -> None:
    """Random sequences of forwards, captures and replays on one open match the oracle, in every mode and engine form.

    Between the forwards, requests join, grow, wait, move to other pages and leave. Some layers share the KV of another
    layer. Graphs are dropped and captured again. Forwards and captures that fail have no effect on later ones.
    """
    assert_histories(subject, *value)


def assert_histories(subject: BackendUnderTest, geometry: Geometry, slot: int) -> None:
    """Run `EXAMPLES` random sequences of a geometry, and raise the shortest failing one that is found.

    Args:
        slot: number that decides what is drawn, next to the seed.
    """
    subject.require(geometry)
    seed = os.environ.get(SEED, "0")
    dice = random.Random(f"{seed} {slot}")
    for _ in range(EXAMPLES):
        history = drawn(dice, LONG if _has_all_modes(geometry) else LENGTH)

        def run(some: Sequence[Draw]) -> Exception | None:
            return _error(subject, geometry, some)

        assert_history(run, history, Engine(geometry).steps, f"--seed {seed}")


def _has_all_modes(geometry: Geometry) -> bool:
    return geometry.modes == tuple(Mode)


def _error(subject: BackendUnderTest, geometry: Geometry, history: Sequence[Draw]) -> Exception | None:
    """Run one sequence on a fresh open of the backend, and return its error or None."""
    engine = Engine(geometry)
    try:
        _run(subject, geometry, engine.num_pages, engine.steps(history))
    except Refused:
        raise
    except Exception as error:
        return error
    return None


def assert_history(
    run: Callable[[Sequence[Draw]], Exception | None],
    history: list[Draw],
    steps: Callable[[Sequence[Draw]], Sequence[object]],
    seed: str,
    runs: int = SHRINKS,
) -> None:
    """Run a sequence, and raise the shortest failing one that is found.

    Args:
        run: runs a sequence on a fresh open, and returns its error or None.
        steps: makes the steps of a sequence, for the message.
        seed: option that repeats the sequence, for the message.
        runs: runs to shrink a failure.
    """
    error = run(history)
    if error is not None:
        shortest, error = shortest_failing(run, history, error, runs)
        raise history_violation(steps(shortest), error, seed) from error


def shortest_failing(
    run: Callable[[Sequence[Draw]], Exception | None], history: list[Draw], error: Exception, left: int = SHRINKS
) -> tuple[list[Draw], Exception]:
    """Return the shortest sequence found that fails, and its error, in at most `left` runs.

    Args:
        run: runs a sequence on a fresh open, and returns its error or None.
    """
    size = len(history) // 2
    while size and left > 0:
        shorter = False
        for start in range(0, len(history), size):
            candidate = history[:start] + history[start + size :]
            left -= 1
            found = run(candidate) if candidate and left >= 0 else None
            if found is not None:
                history, error, shorter = candidate, found, True
                break
        size = size if shorter else size // 2
    return history, error


def history_violation(steps: Sequence[object], error: Exception, seed: str) -> ContractViolation:
    """Return the failure as a `ContractViolation` that lists the steps of the sequence."""
    known = error.details if isinstance(error, ContractViolation) else {}
    wrong = error.wrong if isinstance(error, ContractViolation) else None
    place = replace(wrong, batch=known.get("batch")) if isinstance(wrong, Wrong) else None
    lines = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    return ContractViolation(
        error.what if isinstance(error, ContractViolation) else f"a step raised {type(error).__name__}: {error}",
        batch="\n    ".join([f"the shortest history that was found, with {seed}", *lines, str(known.get("batch", ""))]),
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
    from ..harness.tensor_forms import KV_FORMS, TABLES, TensorForm

    if step.sleeps:
        graphs.sleep()
    form = TensorForm(TABLES[step.table], KV_FORMS[step.kv])
    host = step.host if graphs.harness.bounded else "exact"
    if step.program is None:
        graphs.take(form)
        run_eager(graphs.harness, step, number, host)
        return
    key = key_of(step.forward)
    if key not in graphs.copies:
        graphs.take(form)
        if step.failure is not None:
            graphs.fail_to_capture(key, step.failure)
        graphs.capture(key, short=number % 2 == 1)
    graphs.take(graphs.forms[key])
    if step.poison:
        graphs.harness.arena.poison()
    graphs.assert_replay(step.program, graphs.load(step.forward, seed=number, host=host), f"in step {number + 1}")


def run_eager(harness: Harness, step: Step, number: int, host: str) -> None:
    """Run one eager forward of a sequence and check it."""
    forward = harness.place(step.forward)
    batch = harness.load(forward, host, seed=number)
    if step.poison:
        harness.poison()
    if step.failure is not None:
        harness.fail(forward, batch, step.failure)
        return
    harness.assert_forward(forward, batch, f"the output of step {number + 1}")
    if step.shared:
        harness.assert_sharing_layer(forward, batch, seed=number + 100)
