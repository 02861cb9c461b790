"""Tests of a campaign: results of mutants, and the continuation of an interrupted run."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftmark_contract.check import spread
from tools.mutation import baseline, campaign, judge, order, suite
from tools.mutation.journal import Journal
from tools.mutation.judge import Ended, Status
from tools.mutation.mutation import Mutation
from tools.mutation.review import reviews
from tools.mutation.score import complaints
from tools.mutation.targets import TARGETS

torch.set_num_threads(1)
REFERENCE = TARGETS["reference"]
FEW = [name for name in suite.items() if name.startswith("supports.opens_what_it_supports[")][:3]
"""Items that take milliseconds and reach `supports` and `buffers`."""
DEFECTS = {
    "pass": Status.SURVIVED,
    "return ['not served']": Status.NARROWER,
    "raise ValueError('broken')": Status.KILLED,
    "return 1": Status.KILLED,
    "__import__('os')._exit(3)": Status.HUNG,
}
"""First statement of the reference's `supports` → result of that mutant."""


def _with_first_statement(text: str) -> Mutation:
    """Return a mutant of the reference with this first statement in `supports`, instead of the docstring."""
    tree = ast.parse(REFERENCE.source("__init__"))
    (plugin,) = [n for n, one in enumerate(tree.body) if isinstance(one, ast.ClassDef)]
    methods = tree.body[plugin].body  # type: ignore[attr-defined]
    (method,) = [n for n, one in enumerate(methods) if getattr(one, "name", "") == "supports"]
    like = next(one for one in REFERENCE.mutations() if one.module == "__init__")
    path = (("body", plugin), ("body", method), ("body", 0))
    return replace(like, id=f"made/{text}", path=path, replacement=ast.parse(text).body[0], statement=None)


def _run(folder: Path, *made: Mutation, **plan: object) -> list[Ended]:
    ended: list[Ended] = []
    run_plan = campaign.Plan(made, suite=FEW, workers=1, **plan)  # type: ignore[arg-type]
    campaign.run(REFERENCE, run_plan, Journal(folder, "reference"), ended.append)
    return ended


@pytest.mark.parametrize("text", DEFECTS)
def test_a_mutants_result_matches_its_defect(text: str, tmp_path: Path) -> None:
    """A mutant is killed by a failing item or a crash; a mutant that refuses more geometries ends as narrower."""
    (one,) = _run(tmp_path, _with_first_statement(text))
    assert one.status is DEFECTS[text], one
    assert (one.met, one.of) == (len(FEW) if one.final and not one.item else 1, len(FEW))
    assert bool(one.item) == (one.status in (Status.KILLED, Status.HUNG))


def test_an_endless_loop_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that takes far more CPU time on a mutant than on the original is stopped; the mutant counts as hung."""
    monkeypatch.setattr(judge, "LEAST_S", 0.1)
    monkeypatch.setattr(judge, "TIMES", 0.0)
    (one,) = _run(tmp_path, _with_first_statement("while True: pass"))
    assert one.status is Status.HUNG and one.item in FEW
    assert str(judge.HUNG) in one.message


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    """A run judges only mutants without a result in the journal, unless it selects them by name."""
    first, second = _with_first_statement("pass"), _with_first_statement("return 1")
    assert len(_run(tmp_path, first)) == 1
    assert [one.mutation for one in _run(tmp_path, first, second)] == [second.id]
    assert len(_run(tmp_path, first, second, again=True)) == 2
    assert set(Journal(tmp_path, "reference").ended()) == {first.id, second.id}


def test_a_sampled_survivor_is_not_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that survives a sample of the items runs the rest in a later run, except if a review accepts it."""
    made = _with_first_statement("pass")
    monkeypatch.setattr(order, "FIRST", 0)
    (one,) = _run(tmp_path, made, sample=2)
    assert (one.met, one.of, one.final) == (2, 3, False)
    assert _run(tmp_path, made, sample=2) == []
    assert _run(tmp_path, made, reviewed={made.id}) == []
    (one,) = _run(tmp_path, made)
    assert one.final
    assert _run(tmp_path, made) == []


def test_another_suite_judges_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed suite drops all results. The number of kills per item is kept, because it orders the items."""
    made = _with_first_statement("return 1")
    (one,) = _run(tmp_path, made)
    monkeypatch.setattr(campaign, "identity", lambda target, some: {"suite": "another"})
    assert _run(tmp_path, made) == [one]
    assert Journal(tmp_path, "reference").kills()[one.item] == 2


def test_a_failing_original_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run raises if the original fails an item, because such an item cannot judge a mutant."""
    wrong = suite.Verdict(suite.FAILED, "wrong")
    monkeypatch.setattr(suite, "verdict", lambda backend, item: wrong)
    with pytest.raises(RuntimeError, match="fails on the unchanged copy"):
        _run(tmp_path, _with_first_statement("pass"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mutants", "of_each"), [("reference", 40, 4), ("cuda_triton", 20, 2)])
def test_sampled_mutants_die_or_are_reviewed(name: str, mutants: int, of_each: int, tmp_path: Path) -> None:
    """Mutants from all files of a backend are killed by a sample of the suite, or have a review of their survival."""
    target, few = TARGETS[name], order.of_each(suite.items(), of_each)
    ended: dict[str, Ended] = {}
    chosen = spread(target.mutations(), mutants)
    campaign.run(
        target,
        campaign.Plan(chosen, suite=few, workers=1),
        Journal(tmp_path, name),
        lambda one: ended.update({one.mutation: one}),
    )
    assert set(ended) == {one.id for one in chosen}
    reviewed = reviews(name)
    wrong = complaints(target.mutations(), ended, {one: what for one, what in reviewed.items() if one in ended})
    assert not wrong, "\n".join(wrong)
    assert baseline.read(Journal(tmp_path, name).baseline).keys() == set(few)
