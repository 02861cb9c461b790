"""Checks of batch invariance: with `Limits.batch_invariant` a request's bits do not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftmark.geometry import Mode

from ..behaviour import Fixture, behaviour
from ..cases.batch_invariance import SINCE, Company, Draw, draws
from ..check import Case

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.invariance_harness import InvarianceHarness


def _every_mode() -> Sequence[Case]:
    return draws(*Mode)


@behaviour(Fixture.SUBJECT, cases=_every_mode, since=SINCE)
def holds_in_any_batch(subject: BackendUnderTest, draw: Draw) -> None:
    """With `Limits.batch_invariant` a request has the same output bits in every batch, in every mode served.

    Other requests, their lengths, order and number, padding, pages and host lengths do not matter. A chunk of a prompt
    has the same bits in any batch; the same prompt cut into other chunks may give other bits.
    """
    batches = draw.batches()
    harness = _harness(subject, draw, batches)
    for number, company in enumerate(batches):
        harness.assert_same_bits(company, number)


def _captured_modes() -> Sequence[Case]:
    return draws(*(mode for mode in Mode if mode is not Mode.EXTEND))


@behaviour(Fixture.SUBJECT, cases=_captured_modes, since=SINCE)
def holds_in_any_graph(subject: BackendUnderTest, draw: Draw) -> None:
    """With `Limits.batch_invariant` a replay of any size gives a request the bits of an eager batch of its own."""
    rounds = list(draw.of_sizes())
    harness = _harness(subject, draw, [one for batches in rounds for one in batches])
    for first, *others in rounds:
        assert_replay = harness.captured(first)
        for number, company in enumerate(others):
            assert_replay(company, number)


def _harness(subject: BackendUnderTest, draw: Draw, batches: list[Company]) -> InvarianceHarness:
    """Return a harness for these batches, in which each compared request has run by itself."""
    from ..harness.invariance_harness import InvarianceHarness

    harness = InvarianceHarness(subject, draw, [*draw.alone(), *batches])
    harness.run_alone()
    return harness
