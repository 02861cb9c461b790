"""Tests that a wrong drafter is named: the failure says which of KV, scale, window and position differs."""

from __future__ import annotations

import pytest

from . import catalog, suite
from .mutant import Mutant
from .rules.drafters import KILLER, NAMED

CHECKS = {one.name: one for one in suite.checks_for()}


@pytest.mark.parametrize(("mutant", "layout"), [row for row in catalog.pairs() if row[0].id in NAMED])
def test_a_wrong_drafter_is_named(mutant: Mutant, layout: str) -> None:
    """The check fails on the drafter in a case that the correct backend passes, and names the difference."""
    check, broken = CHECKS[KILLER[mutant.id]], mutant.build(layout)
    case = suite.killing_case(broken, check)
    assert case is not None
    assert f"it reads another {NAMED[mutant.id]} than its target" in str(suite.outcome(broken, check, case))
    assert suite.outcome(suite.original(layout), check, case) is None
