"""Checks of sizes as a space: drawn together, every length in turn, every multiple of a tile, and large counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..cases.sizes import SINCE, drawn, every_length, extremes, multiples, row_counts
from ..check import Refused
from .production import assert_forward

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.harness import Harness


@behaviour(Fixture.FORWARD, cases=drawn, since=SINCE, bugs=("flashinfer#4316", "vllm#41703"))
def may_be_any(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right for drawn head dimensions, heads, pages, batches and lengths; each two ranges of sizes meet.

    Pages have 1 to 1,024 tokens, batches up to 64 requests, requests up to 3,000 keys.
    """
    assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.FORWARDS, cases=every_length, since=SINCE)
def may_be_every_length(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Outputs are right for each number of keys from 1 to 700, one batch after the other on one open."""
    for forward in forwards:
        assert_forward(harness, forward, Contents.COUNTED)


@behaviour(Fixture.FORWARD, cases=multiples, since=SINCE, bugs=("flashinfer#4972", "vllm#47847"))
def may_end_at_any_tile(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right when requests end at a multiple of 16 keys up to 1,024, with or without their new tokens."""
    assert_forward(harness, forward, Contents.COUNTED)


@behaviour(Fixture.FORWARD, cases=extremes, since=SINCE, bugs=("vllm#47671", "vllm#41703"))
def may_pass_small_integers(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right for 256 requests, and for a request of over 65,536 keys, in each mode."""
    assert_forward(harness, forward, Contents.COUNTED)


@behaviour(Fixture.SUBJECT, cases=row_counts, since=SINCE)
def may_be_any_number_of_rows(subject: BackendUnderTest, forwards: Sequence[ForwardCase]) -> None:
    """Outputs are right for each number of rows a request: from 1 to 64 in VERIFY, and drawn up to 160 in other modes.

    Each number has a geometry of its own. A backend may refuse some of them, for example those of several mask words.
    """
    from ..harness.harness import Harness

    refused: Refused | None = None
    served = 0
    for number, forward in enumerate(forwards):
        try:
            harness = Harness(subject, forward.geometry, forward.num_pages)
        except Refused as refusal:
            refused = refusal
            continue
        placed, served = harness.place(forward), served + 1
        harness.assert_forward(placed, harness.load(placed, seed=number))
    if refused is not None and not served:
        raise refused
