"""The suite is judged here: every mutant must fail some check that its correct original passes."""

from __future__ import annotations

import pytest
import torch

from draftmark.contract.check import Check
from draftmark.loaded import Backend

from . import catalog, suite
from .mutant import LAYOUTS, Mutant

torch.set_num_threads(1)


@pytest.mark.parametrize(("mutant", "layout"), [pytest.param(m, n, id=f"{m.id}-{n}") for m, n in catalog.pairs()])
def test_mutant_is_killed(mutant: Mutant, layout: str) -> None:
    """Some check fails."""
    assert suite.first_failure(mutant, layout) is not None, f"{mutant.id} survives in {layout}: {mutant.what}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("check", [pytest.param(one, id=one.name) for one in suite.checks_for()])
def test_original_passes(layout: str, check: Check) -> None:
    """No check fails on the correct backend, so a failing mutant fails for its defect."""
    backend = Backend(layout, LAYOUTS[layout])
    wrong = [f"{name}[{case}]: {error}" for name, case, error in suite.failures(backend, [check])]
    assert not wrong, "\n".join(wrong)


def test_every_known_bug_is_accounted_for() -> None:
    """M01 to M33 each have a mutant or a reason, and a mutant that is missing in a layout says why."""
    ids = {one.id[:3] for one in catalog.MUTANTS} | set(catalog.INAPPLICABLE)
    assert not {f"M{n:02}" for n in range(1, 34)} - ids
    assert not [one.id for one in catalog.MUTANTS if set(one.layouts) != set(LAYOUTS) and not one.absent]
    assert len({one.id for one in catalog.MUTANTS}) == len(catalog.MUTANTS)
