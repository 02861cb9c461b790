"""Items that run many steps on one layer. State that an earlier, longer or larger step left must not matter."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from draftmark.geometry import Geometry, Limits, Mode

from ...cases.forwards import uniform
from ...cases.histories import SEED, Draw, Engine, drawn
from ...check import Refused
from ...checks.random_history import assert_history, run_eager
from ...runner.item import Item, item_of
from ..driver import EngineCapabilities
from ..harness import EngineHarness
from ..step import Step, step_of
from .building import SMALL, case_of, fitted, of_each_mode

FRESH, RANDOM = "history.equals_a_fresh_state", "random_history.equals_the_oracle"
LIMITS = Limits(max_num_reqs=5, max_context_len=200, max_extend_tokens=40, capture_batch_sizes=(1, 3))
ACTIONS = 9
"""Number of actions of `Engine` that the judge draws from; the fifth runs all requests in one mode."""
LENGTH = 14
HISTORIES = 4
SHRINKS = 12
"""Runs to shrink a failing sequence. Each run of an interpreted kernel takes seconds."""
DRAWN = "requests join, grow, leave, wait and return on other pages; steps of every kind run in between"


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return items in which batches grow and shrink, and items that run random sequences of steps."""
    found = []
    shapes = {"fp32": SMALL, "window": replace(SMALL, window_left=19, logits_soft_cap=30.0)}
    shapes["page128"] = replace(SMALL, page_size=128)
    for name, shape in shapes.items():
        found.append(case_of(caps, FRESH, name, _uneven(caps, fitted(caps, shape))))
        for number in range(HISTORIES):
            run = partial(_assert_drawn, caps, fitted(caps, shape, LIMITS), f"{name} {number}")
            found.append(item_of(RANDOM, f"{name}-{number}", run, DRAWN))
    return found


def draws(name: str) -> list[Draw]:
    """Return the random numbers of the history with this name. The environment variable `SEED` is their seed."""
    dice = random.Random(f"{os.environ.get(SEED, '0')} {name}")
    return drawn(dice, LENGTH, ACTIONS, (12,) * 4)


def _uneven(caps: EngineCapabilities, geometry: Geometry) -> list[Step]:
    """Return steps of every mode: many long requests, then few short ones, then both groups again in reverse order."""
    wall = geometry.limits.max_context_len - 5
    few = [one for one in of_each_mode(geometry, (3,))]
    many = [one for one in of_each_mode(geometry, (wall, 129, 250, 1, 64, wall - 1))]
    order = [*many, *few, *reversed(many), *reversed(few)]
    if Mode.DECODE in geometry.modes:
        order.append(uniform("decode-one", geometry, Mode.DECODE, (0,), 1))
    return [step_of(forward, caps.trees) for forward in order]


def _assert_drawn(caps: EngineCapabilities, geometry: Geometry, name: str) -> None:
    """Run a drawn sequence eagerly: an engine has no graph of such a batch, shares no KV and drops no forward."""

    def run(some: Sequence[Draw]) -> Exception | None:
        engine = Engine(geometry)
        harness = cast(Any, EngineHarness(caps, geometry, engine.num_pages))
        try:
            for number, one in enumerate(engine.steps(some)):
                if one.forward.live:
                    run_eager(harness, replace(one, shared=False), number, one.host)
        except Refused:
            raise
        except Exception as error:
            return error
        return None

    assert_history(run, draws(name), Engine(geometry).steps, f"{SEED}={os.environ.get(SEED, '0')}", SHRINKS)
