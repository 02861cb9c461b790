"""Checks of RAGGED_VERIFY and DRAFT_BLOCK, and of an engine's own KV slots, page tables and KV layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.engine_forwards import SINCE, EngineForward, blocks, captures, forms, of_the_device

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


def _assert_forward(subject: BackendUnderTest, case: EngineForward) -> None:
    from ..harness.engine_harness import EngineHarness

    EngineHarness(subject, case).run(case)


@behaviour(Fixture.SUBJECT, cases=of_the_device, since=SINCE)
def rows_are_the_devices(subject: BackendUnderTest, case: EngineForward) -> None:
    """In RAGGED_VERIFY the device sets the row counts; every live row is stored and its output is right.

    Padding rows after the last request store nothing, and their outputs are finite.
    """
    _assert_forward(subject, case)


@behaviour(Fixture.SUBJECT, cases=of_the_device, since=SINCE, bugs=("TRT-LLM#17026", "vllm#40383"))
def keep_to_what_usage_says(subject: BackendUnderTest, case: EngineForward) -> None:
    """In RAGGED_VERIFY a forward writes no byte of a buffer after the bytes that usage() declares for its batch."""
    from ..harness.engine_harness import EngineHarness

    EngineHarness(subject, case).assert_within_usage(case)


@behaviour(Fixture.SUBJECT, cases=blocks, since=SINCE)
def blocks_see_themselves(subject: BackendUnderTest, case: EngineForward) -> None:
    """Each row of a draft block attends to its prefix and to the whole block, within the window.

    The block includes rows that come later than the row itself.
    """
    _assert_forward(subject, case)


@behaviour(Fixture.SUBJECT, cases=forms, since=SINCE)
def forms_are_taken_as_they_are(subject: BackendUnderTest, case: EngineForward) -> None:
    """The backend accepts an engine's own KV slots, wider page tables and strided KV views, in every mode.

    Each row is stored at the slot that the engine gives. A slot of -1 means that the row is not stored.
    """
    _assert_forward(subject, case)


@behaviour(Fixture.SUBJECT, cases=captures, since=SINCE)
def graphs_follow_the_device(subject: BackendUnderTest, rounds: list[EngineForward]) -> None:
    """A graph captured for one batch gives right outputs for other batches of its size.

    The replayed batches have other row counts, lengths, pages and numbers of live requests.
    """
    from draftmark.graphs import GraphKey, Program

    from ..harness.engine_harness import EngineHarness

    first, *others = rounds
    size = first.budget or len(first.forward.requests)
    replay = EngineHarness(subject, *rounds).capture(GraphKey(Program(first.forward.mode.value), size), first)
    for seed, other in enumerate(others, start=1):
        replay(other, seed)
