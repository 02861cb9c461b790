"""Tests that a correct plugin of each layout passes the checks that load a plugin in another process."""

from __future__ import annotations

import pytest

from draftmark.registry import load

from . import catalog, suite
from .mutant import LAYOUTS

CHECKS = sorted({catalog.KILLER[one.id] for one in catalog.MUTANTS if one.standalone and one.id in catalog.KILLER})


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_correct_twin_passes(layout: str, check: str) -> None:
    """A correct plugin that other processes can load passes every case, so a mutant fails only for its defect."""
    backend, (one,) = load(f"twin_{layout}"), [one for one in suite.checks_for() if one.name == check]
    wrong = {case.id: str(error) for case in one.cases() if (error := suite.outcome(backend, one, case))}
    assert not wrong, wrong
