"""Checks of a drafter on the KV of its target. A drafter that reads other data loses acceptance without any error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.drafters import SINCE, Rounds, rounds

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


@behaviour(Fixture.SUBJECT, cases=rounds, since=SINCE, bugs=("vllm#49262", "tokenspeed#613"))
def read_what_their_target_reads(subject: BackendUnderTest, value: Rounds) -> None:
    """In DRAFT, DRAFT_EXTEND and DRAFT_BLOCK a drafter over its target's KV uses the target's KV, scales and window.

    Its positions continue the committed tokens, and it never reads a token that the target rejected. A failure names
    which of KV, scale, window and position differs.
    """
    from ..harness.drafter_harness import DrafterHarness

    DrafterHarness(subject, value).run(value)
