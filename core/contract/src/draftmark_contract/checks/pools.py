"""Checks of KV pools as engines allocate them: several layers in one memory, larger than 32-bit offsets reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.forwards import ForwardCase
from ..cases.pools import SINCE, far

if TYPE_CHECKING:
    from ..harness.harness import Harness


@behaviour(Fixture.LARGE_POOL, cases=far, since=SINCE, bugs=("vllm#47671", "flashinfer#3136"))
def may_be_packed_and_far(harness: Harness, forward: ForwardCase) -> None:
    """In every mode rows are stored and read in a strided pool of several layers, past element offset 2**31.

    The pages of one id lie next to each other for all layers, so the page stride is a multiple of a page's size.
    """
    harness.run(forward, harness.load(forward))
    harness.assert_sparse_pool(forward)
