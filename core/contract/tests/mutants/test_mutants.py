"""The suite is judged here: every mutant must fail some check that its correct original passes."""

from __future__ import annotations

import pytest
import torch

from draftmark.loaded import LoadedBackend
from draftmark_contract.check import Check

from . import catalog, suite
from .mutant import LAYOUTS, Mutant

torch.set_num_threads(1)
COVERING = {
    "A, undersized": ("W01", "W06"),
    "B, capture and replay": ("W69",),
    "C, stale padding": ("M17",),
    "D, empty rows": ("V03",),
    "E, host lengths": ("M07", "W78"),
    "F, lifetime": ("W86",),
    "G, order": ("W63",),
    "I, overflow": ("M29b",),
    "J, pages": ("X22",),
    "K, over-allocation": ("W12b",),
    "L, host reads": ("W82",),
    "semantics": ("X06", "X08"),
    "refusals": ("W34",),
    "tree operations": ("Y01", "Y05"),
    "declarations": ("W41", "W44", "W48"),
}
"""Mutants that every run meets, by class and in each layout; the others are slow. H needs a second rank."""
QUICK = {name for names in COVERING.values() for name in names}
PAIRS = [
    pytest.param(one, layout, id=f"{one.id}-{layout}", marks=() if one.id in QUICK else pytest.mark.slow)
    for one, layout in catalog.pairs()
]


@pytest.mark.parametrize(("mutant", "layout"), PAIRS)
def test_mutant_is_killed(mutant: Mutant, layout: str) -> None:
    """Some check fails."""
    assert suite.first_failure(mutant, layout) is not None, f"{mutant.id} survives in {layout}: {mutant.what}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_original_passes_a_sample(layout: str) -> None:
    """No quick check fails on the correct backend, so a failing mutant fails for its defect."""
    checks = [one for one in suite.checks_for() if one.name.partition(".")[0] not in ("sizing", "proof", "graphs")]
    wrong = [f"{name}[{case}]: {error}" for name, case, error in suite.failures(_original(layout), checks, True)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("check", [pytest.param(one, id=one.name) for one in suite.checks_for()])
def test_original_passes(layout: str, check: Check) -> None:
    """No check fails on any of its cases."""
    wrong = [f"{name}[{case}]: {error}" for name, case, error in suite.failures(_original(layout), [check])]
    assert not wrong, "\n".join(wrong)


def test_every_known_bug_is_accounted_for() -> None:
    """M01 to M33 each have a mutant or a reason, and a mutant that is missing in a layout says why."""
    ids = {one.id[:3] for one in catalog.MUTANTS} | set(catalog.INAPPLICABLE)
    assert not {f"M{n:02}" for n in range(1, 34)} - ids
    assert not [one.id for one in catalog.MUTANTS if set(one.layouts) != set(LAYOUTS) and not one.absent]
    assert len({one.id for one in catalog.MUTANTS}) == len(catalog.MUTANTS)
    assert {one.id for one in catalog.MUTANTS} >= QUICK


def _original(layout: str) -> LoadedBackend:
    return LoadedBackend(layout, LAYOUTS[layout])
