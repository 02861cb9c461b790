"""Checks of the process: a backend changes nothing in it, keeps nothing in it, and serves as long as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry

from ..behaviour import Fixture, behaviour
from ..cases.black_box import one_of_each_mode
from ..cases.engine_forwards import captures
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..cases.lives import NEW, PLANS, STEPS, lives_of_plans, lives_of_steps
from ..check import Case, ContractViolation, Tier
from ..sizing.batches import brief

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

    from ..backend_under_test import BackendUnderTest
    from ..harness.harness import Harness

SINCE = (1, 5)
ALSO = ("all-modes", "all-kv8")
"""Shapes that these checks run in addition to the shapes that every check runs."""


def _of_all_kinds() -> list[Case]:
    names = ("small", *ALSO)
    found = [shape.case(one_of_each_mode(shape.geometry)) for shape in shapes(*ALSO) if shape.name in names]
    return [*found, *(Case(f"engine-{case.id}", case.value[:2]) for case in captures() if "page16" in case.id)]


@behaviour(Fixture.SUBJECT, cases=_of_all_kinds, since=SINCE, bugs=("sglang#29413",))
def is_left_as_it_was(subject: BackendUnderTest, forwards: Sequence[ForwardCase]) -> None:
    """No call of a backend changes the state of its process, whatever that state is.

    Settings, modes, random generators and functions of torch, Python and numpy are state. So are environment variables,
    signal handlers, warnings filters, loggers, import paths, locale, current folder, limits and threads. Every call
    runs under two sets of settings, so a setting that a backend writes once shows in one of them. On the host
    tier a backend that is opened and dropped leaves no memory and no open file.
    """
    from ..harness.calls import calls_of
    from ..harness.process_state import changed, process_state
    from ..harness.settings import engine_settings

    subject.require(forwards[0].geometry)
    for which in range(2):
        for name, batch, call in calls_of(subject, forwards):
            subject.current = batch
            with engine_settings(which):
                before = process_state()
                call()
                wrong = changed(before, process_state())
            if wrong:
                what, (was, now) = next(iter(wrong.items()))
                raise ContractViolation(
                    f"{name} changes {', '.join(list(wrong)[:4])}",
                    batch=brief(batch) if isinstance(batch, Geometry) else batch,
                    got=f"{what} = {_short(now)}",
                    expected=f"{_short(was)}, as before the call",
                    formula="draftmark.backend.AttentionBackend: a call changes only its outputs",
                    bug="sglang#29413",
                    remedy="pass the setting to the call that needs it, use a Generator of your own, or restore it",
                )
    if subject.tier is Tier.HOST:  # A device's runtime has caches of its own.
        _assert_opens_leave_nothing(subject, forwards[0])


def _assert_opens_leave_nothing(subject: BackendUnderTest, forward: ForwardCase) -> None:
    """Open and drop a backend repeatedly; raise `ContractViolation` if each open leaves a file, a tensor or bytes."""
    from ..harness.harness import Harness
    from ..harness.held_memory import assert_keeps_no_memory

    harness = Harness(subject, forward.geometry, forward.num_pages)
    assert_keeps_no_memory(
        "an open of a backend that is dropped",
        OPENS,
        subject.device,
        lambda _: harness.fresh(),
        "draftmark.arena.Arena: the engine owns it, and frees it with the backend",
        "keep an opened backend in no module, thread or handler, and close its files when it is dropped",
    )


OPENS = 8
"""Number of opens in this check. The first quarter may fill caches; the others may leave nothing in the process."""
LOOKED_AT = frozenset((*range(255, 258), 1000, *range(4095, 4098), *range(65_535, 65_538), PLANS - 1))
"""Plans after which a whole forward is checked; an interpreter is too slow to check every one."""


@behaviour(Fixture.SUBJECT, cases=lives_of_plans, since=SINCE, bugs=("sglang#27664", "rtp-llm#1259"))
def plans_serve_for_long(subject: BackendUnderTest, life: tuple[int, list[ForwardCase]]) -> None:
    """After 66,000 plans a forward is right, and 5,000 plans of new lengths and layouts leave no memory."""
    from ..harness.harness import Harness
    from ..harness.held_memory import assert_keeps_no_memory
    from ..harness.life import new_batches

    plans, forwards = life
    harness = Harness(subject, forwards[0].geometry, max(forward.num_pages for forward in forwards))
    forwards = [harness.place(forward) for forward in forwards]
    # No tensor of a batch is filled again, because a plan reads none of them.
    batches = new_batches(harness, [harness.set(forward) for forward in forwards])

    def plan(number: int, batch: ForwardBatch) -> None:
        if number not in LOOKED_AT:
            harness.backend.plan(batch)
            return
        forward = forwards[number % len(forwards)]
        harness.assert_forward(forward, harness.load(forward, seed=number), f"the output after {number} plans")

    first = NEW // 4
    for number in range(first):
        plan(number, next(batches))
    # Caches that are bounded in any useful way are full by now.
    assert_keeps_no_memory("plan()", NEW - first, subject.device, lambda number: plan(first + number, next(batches)))
    known = [next(batches) for _ in range(257)]
    for number in range(NEW, plans):
        plan(number, known[number % len(known)])


@behaviour(Fixture.FORWARDS, cases=lives_of_steps, since=SINCE, bugs=("sglang#27664",))
def steps_serve_for_long(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Each of 4,200 steps on one arena gives the bits that its forward gave at first, and the steps leave no memory.

    Without kernels that run here, 420 steps run and the metadata of each is decoded.
    """
    from ..harness.held_memory import assert_keeps_no_memory
    from ..harness.life import Life

    life = Life(harness, forwards)
    steps = STEPS if harness.kernels else STEPS // 10
    measured = steps // 10
    for number in range(steps - measured):
        life.step(number)
    assert_keeps_no_memory(
        "a step", measured, harness.subject.device, lambda number: life.step(steps - measured + number)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} …"
