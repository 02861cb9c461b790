"""What goes beyond the five core modes: rows that the device decides, whole draft blocks, an engine's own forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Given, behaviour
from ..cases.engine_forwards import SINCE, EngineForward, blocks, captures, forms, of_the_device

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


def _holds(subject: BackendUnderTest, case: EngineForward) -> None:
    from ..harness.engine_harness import EngineHarness

    EngineHarness(subject, case).run(case)


@behaviour(Given.SUBJECT, cases=of_the_device, since=SINCE)
def rows_are_the_devices(subject: BackendUnderTest, case: EngineForward) -> None:
    """Whatever row counts stand on the device, each row is stored and right; rows of nobody store none, are finite."""
    _holds(subject, case)


@behaviour(Given.SUBJECT, cases=of_the_device, since=SINCE, bugs=("TRT-LLM#17026", "vllm#40383"))
def keep_to_what_usage_says(subject: BackendUnderTest, case: EngineForward) -> None:
    """Whatever row counts stand on the device, no byte behind the usage() of the batch is written."""
    from ..harness.engine_harness import EngineHarness

    EngineHarness(subject, case).keeps_to_usage(case)


@behaviour(Given.SUBJECT, cases=blocks, since=SINCE)
def blocks_see_themselves(subject: BackendUnderTest, case: EngineForward) -> None:
    """Each row of a draft block sees its prefix and the whole block, later rows too, within the window."""
    _holds(subject, case)


@behaviour(Given.SUBJECT, cases=forms, since=SINCE)
def forms_are_taken_as_they_are(subject: BackendUnderTest, case: EngineForward) -> None:
    """Rows go to the engine's slots or nowhere; its table may be wider, its KV views of packed pages; in every mode."""
    _holds(subject, case)


@behaviour(Given.SUBJECT, cases=captures, since=SINCE)
def graphs_follow_the_device(subject: BackendUnderTest, rounds: list[EngineForward]) -> None:
    """A graph that was captured for one batch replays others of its size: other rows, lengths, pages, live requests."""
    from draftmark.graphs import GraphKey, Program

    from ..harness.engine_harness import EngineHarness

    first, *others = rounds
    size = first.budget or len(first.forward.requests)
    replay = EngineHarness(subject, *rounds).capture(GraphKey(Program(first.forward.mode.value), size), first)
    for seed, other in enumerate(others, start=1):
        replay(other, seed)
