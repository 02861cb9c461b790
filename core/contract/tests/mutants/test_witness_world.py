"""Tests of the forwards that show the mutants `O…`: every design is right in them, and so is every mutant."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch

from draftmark import Mode
from draftmark.loaded import LoadedBackend

from . import catalog
from .mutant import LAYOUTS, Mutant
from .witness_world import CLOSE, Forward, geometry, pools, requests, right

MUTANTS = [one for one in catalog.MUTANTS if one.id.startswith("O")]


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Undo what OB1, OB4, OB5 and OB7 leave in the process, and give torch the one thread that hides OC5."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with np.errstate(), patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)
    gc.enable()
    torch.set_flush_denormal(False)


def ordinary(loaded: LoadedBackend) -> float:
    """Return the largest error of short forwards, each on its own open, with a window and without."""
    wide, found = loaded.info.modes == tuple(Mode), 0.0
    tree = (-1, 0, 0, 2)
    for window in (-1, 7):
        modes = tuple(Mode) if wide else (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
        shape = geometry(nodes=4, block=4, budgets=(9,), window_left=window, modes=modes)
        two, three = requests(shape, (13, 6)), requests(shape, (13, 6, 0), 4)
        caches = pools(shape, 40)
        forwards = [
            Forward(shape, Mode.VERIFY, three, caches, tree, 4),
            Forward(shape, Mode.EXTEND, requests(shape, (13, 0), (3, 6)), caches),
            Forward(shape, Mode.DECODE, two, caches, padded=3),
        ]
        if wide:
            uneven = requests(shape, (13, 6), (1, 4))
            forwards.append(Forward(shape, Mode.DRAFT_BLOCK, three, caches))
            forwards.append(Forward(shape, Mode.RAGGED_VERIFY, uneven, caches, tree, 3, budget=9))
        found = max(found, *(one.run(loaded.open(shape, "cpu", guard=True)) for one in forwards))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_designs_agree_with_the_float64_attention(layout: str) -> None:
    """Every backend that is mutated agrees with the float64 attention of these tests, in every mode that it serves."""
    assert ordinary(right(layout)) < CLOSE


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.id)
def test_mutant_is_right_in_ordinary_forwards(mutant: Mutant) -> None:
    """A blind mutant needs its class of history, size, pool or process: short forwards do not show it."""
    for layout in mutant.layouts:
        assert ordinary(mutant.build(layout)) < CLOSE
