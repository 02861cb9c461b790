"""Checks of values with fewer elements than keys: output and cache have the width of the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases import latent_sizes as sizes
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..cases.narrow_values import SINCE, each_mode
from .production import assert_forward

if TYPE_CHECKING:
    from ..harness.harness import Harness


@behaviour(Fixture.FORWARDS, cases=each_mode, since=SINCE)
def match_float64(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Outputs and stored values have value_dim elements, and the default scale is that of the keys."""
    for number, forward in enumerate(forwards):
        for contents in (Contents.SPREAD, Contents.NEEDLES):
            harness.assert_forward(forward, harness.load(forward, contents=contents, seed=number))


@behaviour(Fixture.FORWARD, cases=sizes.narrow_crowds, since=SINCE)
def a_crowd_is_right(harness: Harness, forward: ForwardCase) -> None:
    """A batch of 24 requests, the longest with over 2,048 keys, is right in every mode."""
    assert_forward(harness, forward, Contents.WEIGHED)
