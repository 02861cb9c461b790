"""Tests that a wrong drafter is named: the failure says which of KV, scale, window and position differs."""

from __future__ import annotations

import pytest

from . import catalog, suite
from .drafters import KILLER, MUTANTS, NAMED
from .mutant import Mutant

CHECKS = {one.name: one for one in suite.checks_for()}


@pytest.mark.parametrize(("mutant", "layout"), [(one, layout) for one in MUTANTS for layout in one.layouts])
def test_a_wrong_drafter_is_named(mutant: Mutant, layout: str) -> None:
    """The check fails on the drafter in a case that the correct backend passes, and names the difference."""
    assert mutant in catalog.MUTANTS
    check, broken = CHECKS[KILLER[mutant.id]], mutant.build(layout)
    case = suite.killing_case(broken, check)
    assert case is not None
    assert f"it reads another {NAMED[mutant.id]} than its target" in str(suite.outcome(broken, check, case))
    assert suite.outcome(suite.original(layout), check, case) is None
