"""Tests that a row's bits depend on the other requests in OH…, and not in the backends that they change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import Mode
from draftmark.loaded import LoadedBackend

from . import catalog
from .designs.tutorial import Backend
from .mutant import Mutant
from .rules.batch_invariance import declared
from .witness_world import CLOSE, Forward, geometry, pools, requests, right

torch.set_num_threads(1)
SHAPE = geometry((8, 2), 64, 16, reqs=40, context=512)
SHAPE = replace(SHAPE, limits=replace(SHAPE.limits, batch_invariant=True))
MINE = requests(SHAPE, (230,))
OTHERS = requests(SHAPE, [3 + 11 * i % 97 for i in range(39)], first=40)


def bits(loaded: LoadedBackend, others: int) -> torch.Tensor:
    """Return one request's output with some other requests in the batch."""
    forward = Forward(SHAPE, Mode.DECODE, [*MINE, *OTHERS[:others]], pools(SHAPE, 400))
    dice = torch.Generator().manual_seed(5)
    for rows in forward.rows[0][:3]:
        rows[0].copy_(torch.randn(rows[0].shape, generator=dice))
    assert forward.run(loaded.open(SHAPE, "cpu", guard=False)) < CLOSE
    return forward.rows[0][3][0]


@pytest.mark.parametrize("mutant", catalog.named(("OH1", "OH2", "OH3")), ids=lambda one: one.id)
def test_bits_depend_on_other_requests_only_in_the_mutant(mutant: Mutant) -> None:
    """One request's output has the same bits with 0, 7 and 39 others; in the mutant it has other bits."""
    for layout in mutant.layouts:
        unchanged = LoadedBackend("tugboat", declared(Backend)()) if layout == "tutorial" else right(layout)
        for loaded, same in ((unchanged, True), (mutant.build(layout), False)):
            alone, *crowded = (bits(loaded, others) for others in (0, 7, 39))
            assert all(torch.equal(alone, one) for one in crowded) is same
