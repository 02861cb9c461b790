"""Checks of pages left of a sliding window, which engines give back while the request still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.forwards import ForwardCase
from ..cases.windows import SINCE, eager, replayed

if TYPE_CHECKING:
    from ..harness.harness import Harness

BUGS = ("vllm#42273", "vllm#43961")


@behaviour(Fixture.FORWARDS, cases=eager, since=SINCE, bugs=BUGS)
def hide_what_pages_left_of_them_hold(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A page-table column left of every row's window names any page of the pool, and its contents change no output.

    A column is left of the window if all its positions lie before L - window_left. It may name the null page, a page of
    NaN, or a page that another request owns now and writes to in the same forward. It never holds -1.
    """
    for forward in forwards:
        harness.assert_forward(forward, harness.load(forward), "with foreign pages left of the window the output")


@behaviour(Fixture.FORWARDS, cases=replayed, since=SINCE, bugs=BUGS)
def hide_what_pages_left_of_them_hold_in_a_graph(harness: Harness, rounds: list[ForwardCase]) -> None:
    """A replay does not depend on the contents of pages left of the window, which change from replay to replay."""
    from ..harness.graph_harness import GraphHarness

    GraphHarness(harness).assert_replays(rounds, "with foreign pages left of the window")
