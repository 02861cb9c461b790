"""Items that run many steps on one layer. State that an earlier, longer or larger step left must not matter."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from draftmark.geometry import Geometry, Limits, Mode

from ...cases.forwards import uniform
from ...cases.histories import SEED, Draw, Engine, drawn
from ...cases.histories import Step as Drawn
from ...check import ContractViolation
from ...runner.item import Item
from ..driver import EngineCapabilities
from ..step import Step, step_of
from ..subject import EngineSubject
from .building import fitted, on_subject
from .numerics import SMALL, of_each_mode

FRESH, RANDOM = "history.equals_a_fresh_state", "random_history.equals_the_oracle"
LIMITS = Limits(max_num_reqs=5, max_context_len=200, max_extend_tokens=40, capture_batch_sizes=(1, 3))
ACTIONS = 9
"""Number of actions of `Engine` that the judge draws from; the fifth runs all requests in one mode."""
LENGTH = 14
HISTORIES = 4
LOOSE = {"exact": 0, "tight_bound": 0, "upper_bound": 33, "unknown": 1000}
"""Tokens by which the host's upper bounds exceed a drawn step's lengths, by kind of host lengths."""
DRAWN = "requests join, grow, leave, wait and return on other pages; steps of every kind run in between"


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return items in which batches grow and shrink, and items that run random sequences of steps."""
    found = []
    shapes = {"fp32": SMALL, "window": replace(SMALL, window_left=19, logits_soft_cap=30.0)}
    shapes["page128"] = replace(SMALL, page_size=128)
    for name, shape in shapes.items():
        geometry = fitted(caps, shape)
        steps = _uneven(caps, geometry)
        pages = max(step.forward.num_pages for step in steps)
        found.append(on_subject(caps, FRESH, name, geometry, pages, partial(_in_turn, steps=steps)))
        small = fitted(caps, shape, LIMITS)
        pages = Engine(small).num_pages
        for number in range(HISTORIES):
            body = partial(_drawn, name=f"{name} {number}", trees=caps.trees)
            found.append(on_subject(caps, RANDOM, f"{name}-{number}", small, pages, body, DRAWN))
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


def _in_turn(subject: EngineSubject, steps: Sequence[Step]) -> None:
    done: list[str] = []
    for number, step in enumerate(steps):
        try:
            subject.assert_step(step, seed=number)
        except ContractViolation as error:
            error.add_note(f"after {', '.join(done[-4:]) or 'nothing'}")
            raise
        done.append(step.forward.name)


def _drawn(subject: EngineSubject, name: str, trees: bool) -> None:
    drawn: list[Drawn] = Engine(subject.geometry).steps(draws(name))
    earlier: list[str] = []
    for number, one in enumerate(drawn):
        step = replace(step_of(one.forward, trees), loose=LOOSE[one.host])
        if not step.forward.requests:
            continue
        earlier.append(f"{number}. {one}")
        try:
            subject.assert_step(step, seed=number)
        except ContractViolation as error:
            error.details["batch"] = "\n      ".join([*earlier[-5:], str(step)])
            raise
