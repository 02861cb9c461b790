"""Checks of sizes as a space: drawn together, every length in turn, every multiple of a tile, and large counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..cases.sizes import SINCE, drawn, every_length, extremes, multiples
from .production import assert_forward

if TYPE_CHECKING:
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
