"""Tests of the designs with chosen keys, and of their mutants: correct designs pass, mutants fail their check."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import Check, spread
from draftmark_testing.pairs import in_turn

from . import catalog, suite
from .designs import tutorial
from .designs.chosen_designs import DESIGNS, listed_plugin
from .mutant import Mutant

torch.set_num_threads(1)
CHECKS = {one.name: one for one in suite.checks_for() if one.name.partition(".")[0] == "chosen"}
QUICK = ("C01", "C05", "C09", "C12", "C15", "C20", "C36")
"""Mutants of the quick run, of several classes."""
ROWS = [
    pytest.param(one, layout, id=f"{one.id}-{layout}", marks=[] if one.id in QUICK else [pytest.mark.slow])
    for one in catalog.MUTANTS
    if one.id.startswith("C")
    for layout in one.layouts
]


def _wrong(check: Check, design: str) -> list[object]:
    backend = tutorial.loaded(listed_plugin(DESIGNS[design]))
    return [suite.outcome(backend, check, case) for case in spread(check.cases(), 1)]


@pytest.mark.parametrize(
    ("check", "design"), in_turn({name: one for name, one in CHECKS.items() if "int32" not in name}, DESIGNS, 1)
)
def test_design_is_right(check: Check, design: str) -> None:
    """A correct backend of another design than the reference's passes each check of chosen keys."""
    wrong = _wrong(check, design)
    assert not any(wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("check", [pytest.param(one, id=name) for name, one in CHECKS.items()])
def test_each_design_is_right(check: Check, design: str) -> None:
    """Every such backend passes every check of chosen keys, also those with more than 2³¹ elements of cache."""
    wrong = _wrong(check, design)
    assert not any(wrong), wrong


@pytest.mark.parametrize(("mutant", "layout"), ROWS)
def test_mutant_is_killed_by_its_check(mutant: Mutant, layout: str) -> None:
    """A mutant of chosen keys fails the check of its class."""
    check = CHECKS[catalog.KILLER[mutant.id]]
    assert suite.killing_case(mutant.build(layout), check) is not None, f"{mutant.id} survives {check.name}"
