"""Tests that the mutants OF… and OK… are wrong, and that the backends that they change are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftmark import Mode
from draftmark.loaded import LoadedBackend

from . import catalog
from .mutant import Mutant
from .rules.sizes import TILE
from .witness_world import CLOSE, Forward, geometry, pools, requests, right, run


def exactly_two_tiles(loaded: LoadedBackend) -> float:
    """A decode with keys that fill exactly two tiles, next to a request of another length."""
    shape = geometry(page=16, context=512)
    return run(loaded, shape, Mode.DECODE, requests(shape, (2 * TILE - 1, 200)))


def forty_one_rows(loaded: LoadedBackend) -> float:
    """A verify of 41 rows for each of three requests."""
    shape = geometry(nodes=41)
    return run(loaded, shape, Mode.VERIFY, requests(shape, (5, 9, 2), 41))


def crowds_of_one_bucket(loaded: LoadedBackend) -> float:
    """Decodes of 65 and then 72 requests."""
    shape = geometry((2, 2), reqs=80, context=16)
    backend, found = loaded.open(shape, "cpu", guard=False), 0.0
    for size in (65, 72):
        live = requests(shape, [1 + i % 11 for i in range(size)])
        found = max(found, Forward(shape, Mode.DECODE, live, pools(shape, 300)).run(backend))
    return found


def columns(loaded: LoadedBackend) -> float:
    """Decodes with head sizes from 64 to 256 that models have."""
    found = []
    for dim in (64, 80, 96, 112, 128, 192, 256):
        shape = geometry((2, 1), dim)
        found.append(run(loaded, shape, Mode.DECODE, requests(shape, (9, 4))))
    return max(found)


def long_e4m3(loaded: LoadedBackend) -> float:
    """A decode over 1,500 keys of e4m3 with a scale for K."""
    shape = geometry((4, 2), 32, 64, context=2048, kv_dtype="float8_e4m3fn")
    live = requests(shape, (1500, 300))
    caches = [replace(one, k_scale=torch.tensor([0.25])) for one in pools(shape, 40)]
    return run(loaded, shape, Mode.DECODE, live, caches=caches)


def long_windowed_block(loaded: LoadedBackend) -> float:
    """Draft blocks with a window, after 1,100 and 40 keys."""
    shape = geometry(
        page=16, context=2048, block=8, nodes=8, window_left=100, modes=(Mode.DECODE, Mode.EXTEND, Mode.DRAFT_BLOCK)
    )
    return run(loaded, shape, Mode.DRAFT_BLOCK, requests(shape, (1100, 40), 8))


def long_with_sinks(loaded: LoadedBackend) -> float:
    """A decode over 2,300 keys with sinks that keep about half of the weight."""
    shape = geometry(page=64, context=4096, sinks=True)
    caches = [replace(one, sinks=torch.tensor([7.5, 8.0, 7.0, 8.5])) for one in pools(shape, 60)]
    return run(loaded, shape, Mode.DECODE, requests(shape, (2300, 100)), caches=caches)


def uneven_crowd(loaded: LoadedBackend) -> float:
    """RAGGED_VERIFY of 300 rows for 30 requests; one request has 40 of them."""
    shape = geometry(
        (8, 1), reqs=30, context=32, nodes=40, budgets=(300,), modes=(Mode.DECODE, Mode.EXTEND, Mode.RAGGED_VERIFY)
    )
    rows = [40, *[9] * 28, 8]
    live = requests(shape, [3 + i % 5 for i in range(30)], rows)
    return run(loaded, shape, Mode.RAGGED_VERIFY, live, budget=300)


def far_past_the_window(loaded: LoadedBackend) -> float:
    """A decode over 33,000 keys with a window of 16."""
    shape = geometry((1, 1), 16, 256, reqs=2, context=33_024, window_left=16)
    return run(loaded, shape, Mode.DECODE, requests(shape, (33_000, 90)))


def block_over_e4m3(loaded: LoadedBackend) -> float:
    """Draft blocks over e4m3 KV."""
    shape = geometry(block=4, modes=(Mode.DECODE, Mode.EXTEND, Mode.DRAFT_BLOCK), kv_dtype="float8_e4m3fn")
    return run(loaded, shape, Mode.DRAFT_BLOCK, requests(shape, (30, 9), 4))


def capped_groups(loaded: LoadedBackend) -> float:
    """Decodes with a soft cap and groups of 2, 8 and 16 query heads."""
    shapes = [geometry((heads, 1), logits_soft_cap=1.0) for heads in (2, 8, 16)]
    return max(run(loaded, one, Mode.DECODE, requests(one, (30, 9))) for one in shapes)


WITNESSES: dict[str, Callable[[LoadedBackend], float]] = {
    "OF1": exactly_two_tiles,
    "OF2": forty_one_rows,
    "OF3": crowds_of_one_bucket,
    "OF4": columns,
    "OF5": far_past_the_window,
    "OK1": long_e4m3,
    "OK2": long_windowed_block,
    "OK3": long_with_sinks,
    "OK4": uneven_crowd,
    "OK5": block_over_e4m3,
    "OK6": capped_groups,
}
"""For each mutant a batch that shows it; the result is the largest difference from float64."""


@pytest.mark.parametrize("mutant", catalog.named(WITNESSES), ids=lambda one: one.id)
def test_size_is_wrong_only_on_the_mutant(mutant: Mutant) -> None:
    """The batch gives a wrong result on the mutant and a right one on the backend without the defect."""
    witness = WITNESSES[mutant.id]
    for layout in mutant.layouts:
        assert witness(right(layout)) < CLOSE
        assert witness(mutant.build(layout)) > CLOSE
