"""Tests of the suite: every mutant fails some check that the correct backend passes."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import Check

from . import catalog, suite
from .mutant import USUAL, Mutant

torch.set_num_threads(1)
COVERING = {
    "A, undersized": {"W01": "guards.survive_every_step", "W06": "metadata.decodes_to_the_token_history"},
    "B, capture and replay": {"W69": "purity.nothing_is_kept_or_moved"},
    "C, stale padding": {"M17": "padding.changes_no_live_byte"},
    "D, empty rows": {"V03": "metadata.decodes_to_the_token_history"},
    "E, host lengths": {"M07": "metadata.decodes_to_the_token_history", "W78": "padding.changes_no_live_byte"},
    "F, lifetime": {"W86": "purity.nothing_is_kept_or_moved"},
    "G, order": {"W63": "purity.plan_does_not_depend_on_device_memory"},
    "I, overflow": {"M29b": "metadata.survives_high_page_ids"},
    "J, pages": {"X22": "metadata.decodes_to_the_token_history"},
    "K, over-allocation": {"W12b": "tightness.index_buffers"},
    "L, host reads": {"W82": "purity.steps_read_no_device_memory"},
    "semantics": {"X06": "numerics.match_float64", "X08": "padding.changes_no_live_byte"},
    "refusals": {"W34": "supports.answers_alike"},
    "process": {"P01": "process.is_left_as_it_was"},
    "sizes elsewhere": {"J03": "supports.answers_alike_elsewhere"},
    "tree operations": {"Y01": "tree_ops.tail_follows_the_parents", "Y05": "tree_ops.walk_follows_the_target"},
    "declarations": {
        "W41": "load.declares_types", "W44": "metadata.decodes_to_the_token_history", "W48": "load.describes_itself",
    },
}  # fmt: skip
"""Mutants of the quick run, by class, each with a check that kills it in every layout. Class H needs two ranks."""
QUICK = {name: check for names in COVERING.values() for name, check in names.items()}
PAIRS = [pytest.param(one, layout, id=f"{one.id}-{layout}") for one, layout in catalog.pairs()]
CHECKS = {one.name: one for one in suite.checks_for()}


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(("mutant", "layout"), [pair for pair in PAIRS if pair.values[0].id in QUICK])
def test_mutant_is_killed_by_its_check(mutant: Mutant, layout: str) -> None:
    """The check fails on the mutant in a case that the correct backend passes."""
    check = CHECKS[QUICK[mutant.id]]
    killing = suite.killing_case(mutant.build(layout), check)
    assert killing is not None, f"{mutant.id} survives {check.name} in {layout}: {mutant.what}"
    assert suite.outcome(suite.original(layout), check, killing) is None, (
        f"{check.name} fails on the correct backend too"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "layout"), [pair for pair in PAIRS if pair.values[0].id in catalog.KILLER])
def test_outside_mutant_is_killed_by_its_class_check(mutant: Mutant, layout: str) -> None:
    """A mutant by an outside author, or a mutant of attention sinks, fails the check for its class of defects."""
    check = CHECKS[catalog.KILLER[mutant.id]]
    assert suite.killing_case(mutant.build(layout), check) is not None, f"{mutant.id} survives {check.name}"


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "layout"), [pair for pair in PAIRS if pair.values[0].plugin is None])
def test_mutant_is_killed(mutant: Mutant, layout: str) -> None:
    """At least one check fails on the mutant."""
    assert suite.first_failure(mutant, layout) is not None, f"{mutant.id} survives in {layout}: {mutant.what}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", USUAL)
@pytest.mark.parametrize("check", [pytest.param(one, id=one.name) for one in suite.checks_for()])
def test_original_passes(layout: str, check: Check) -> None:
    """The correct backend passes every case of every check, so a mutant fails only for its defect."""
    wrong = [f"{name}[{case}]: {error}" for name, case, error in suite.failures(suite.original(layout), [check])]
    assert not wrong, "\n".join(wrong)


def test_every_known_bug_is_accounted_for() -> None:
    """Each known bug M01 to M33 has a mutant or a reason for having none. Mutants state why they skip a layout."""
    ids = {one.id[:3] for one in catalog.MUTANTS} | set(catalog.INAPPLICABLE)
    assert not {f"M{n:02}" for n in range(1, 34)} - ids
    assert not [one.id for one in catalog.MUTANTS if set(one.layouts) != set(USUAL) and not one.absent]
    assert len({one.id for one in catalog.MUTANTS}) == len(catalog.MUTANTS)
    assert {one.id for one in catalog.MUTANTS} >= set(QUICK)
