"""Checks of forked requests: samples of one prompt, and answers that branch, read the same prefix pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.contents import Contents
from ..cases.forks import SINCE, eager, replayed
from ..cases.forwards import ForwardCase

if TYPE_CHECKING:
    from ..harness.harness import Harness


@behaviour(Fixture.FORWARDS, cases=eager, since=SINCE)
def are_requests_of_their_own(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Requests that share prefix pages, with equal or other lengths, each store and attend to their own new tokens.

    Page tables of forks begin alike. Only the page with the end of the prefix and the pages of new tokens differ.
    """
    for number, forward in enumerate(forwards):
        contents = Contents.NEEDLES if number % 2 else Contents.USUAL
        harness.assert_forward(forward, harness.load(forward, contents=contents, seed=number), "the output of forks")


@behaviour(Fixture.FORWARDS, cases=replayed, since=SINCE)
def are_requests_of_their_own_in_a_graph(harness: Harness, rounds: list[ForwardCase]) -> None:
    """A replay is right for forks, whether the graph was captured on one request or on other forks."""
    from ..harness.graph_harness import GraphHarness

    GraphHarness(harness).assert_replays(rounds, "with forks")
