"""Tests of the latent designs, and of the mutants of latent rows: correct designs pass, mutants fail their check."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import Check, spread
from draftmark_testing.pairs import in_turn

from . import catalog, suite
from .designs import tutorial
from .designs.latent_designs import DESIGNS, latent_plugin
from .mutant import Mutant

torch.set_num_threads(1)
CHECKS = {one.name: one for one in suite.checks_for() if one.name.partition(".")[0].startswith("latent")}
QUICK = 1
"""Cases of a check that each design runs in a quick run."""
ROWS = [pytest.param(*row, id=f"{row[0].id}-{row[1]}") for row in catalog.pairs() if row[0].id.startswith("A")]


def _wrong(check: Check, design: str) -> list[object]:
    backend = tutorial.loaded(latent_plugin(DESIGNS[design]))
    return [suite.outcome(backend, check, case) for case in spread(check.cases(), QUICK)]


@pytest.mark.parametrize(
    ("check", "design"), in_turn({name: one for name, one in CHECKS.items() if "int32" not in name}, DESIGNS)
)
def test_design_is_right(check: Check, design: str) -> None:
    """Correct latent backends of two designs other than the reference's pass each check of latent layers."""
    wrong = _wrong(check, design)
    assert not any(wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("check", [pytest.param(one, id=name) for name, one in CHECKS.items()])
def test_each_design_is_right(check: Check, design: str) -> None:
    """Every such backend passes every check of latent layers, also those with more than 2³¹ elements of cache."""
    wrong = _wrong(check, design)
    assert not any(wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "layout"), ROWS)
def test_mutant_is_killed_by_its_check(mutant: Mutant, layout: str) -> None:
    """A mutant of latent rows fails the check of its class."""
    check = {one.name: one for one in suite.checks_for()}[catalog.KILLER[mutant.id]]
    assert suite.killing_case(mutant.build(layout), check) is not None, f"{mutant.id} survives {check.name}"
