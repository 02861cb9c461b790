"""Tests of the designs of recurrent state, and of their mutants: correct designs pass, mutants fail their check."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftmark.loaded import LoadedBackend
from draftmark_contract.check import Check, spread
from draftmark_reference import ReferencePlugin, Rollback
from draftmark_testing.pairs import in_turn

from . import catalog, suite
from .designs import tutorial
from .designs.state_plugin import STATE_DESIGNS, state_plugin
from .mutant import Mutant

torch.set_num_threads(1)
CHECKS = {one.name: one for one in suite.checks_for() if one.name.startswith(suite.OF_STATE)}
SLOW = (
    "state_history.does_not_drift",
    "state_late.replays_in_flight_are_their_own",
    "state_late.rounds_in_flight_are_their_own",
    "state_sizing.largest_batch_covers_all",
)
"""Checks that take a second or more on every design."""
QUICK = 1
"""Cases of a check that each design runs in a quick run."""
FEW = ("E01", "E05", "E15", "E19", "E24", "E28", "E39", "E44", "E53", "E56")
"""Mutants of a quick run: one of each class of defects."""


DESIGNS: dict[str, Callable[[], LoadedBackend]] = {
    **{name: lambda name=name: tutorial.loaded(state_plugin(STATE_DESIGNS[name])) for name in STATE_DESIGNS},  # type: ignore[misc]
    "replay": lambda: LoadedBackend("reference", ReferencePlugin(Rollback.REPLAY)),
    "snapshots": lambda: LoadedBackend("reference", ReferencePlugin(Rollback.SNAPSHOTS)),
}
OF_STATE = [one for one in catalog.MUTANTS if one.of_state]
MUTANTS = [pytest.param(one, layout, id=one.id) for one in OF_STATE for layout in one.layouts]


@pytest.mark.parametrize(
    ("check", "design"), in_turn({name: one for name, one in CHECKS.items() if name not in SLOW}, DESIGNS)
)
def test_design_is_right(check: Check, design: str) -> None:
    """Correct backends of two designs pass each check of recurrent state."""
    backend = DESIGNS[design]()
    wrong = [suite.outcome(backend, check, case) for case in spread(check.cases(), QUICK)]
    assert not any(wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("check", [pytest.param(one, id=name) for name, one in CHECKS.items()])
def test_design_passes_every_item(check: Check, design: str) -> None:
    """A correct backend of each design passes every item, so that a mutant fails only for its defect."""
    wrong = [f"{case}: {error}" for _, case, error in suite.failures(DESIGNS[design](), [check])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("mutant", "layout"), [one for one in MUTANTS if one.id in FEW])
def test_mutant_of_each_class_is_killed(mutant: Mutant, layout: str) -> None:
    """A mutant of recurrent state fails the check of its class of defects."""
    assert suite.killing_case(mutant.build(layout), CHECKS[catalog.KILLER[mutant.id]]) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "layout"), MUTANTS)
def test_mutant_is_killed_by_its_check(mutant: Mutant, layout: str) -> None:
    """Every mutant of recurrent state fails the check of its class of defects."""
    check = CHECKS[catalog.KILLER[mutant.id]]
    assert suite.killing_case(mutant.build(layout), check) is not None, f"{mutant.id} survives {check.name}"


def test_mutants_come_from_public_bugs() -> None:
    """At least 25 mutants imitate public bugs, a third of them or more in designs other than the reference's."""
    public = [one for one in OF_STATE if "#" in one.source]
    other = [one for one in public if one.plugin is not None]
    assert len(public) >= 25 and 3 * len(other) >= len(public)
    assert {one.id for one in OF_STATE} <= set(catalog.KILLER)
