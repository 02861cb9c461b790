"""Tests of the judge's items for layers with recurrent state: a correct layer passes, and each defect is found."""

from __future__ import annotations

import pytest

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.states.questions import RULES, questions
from draftmark_contract.runner.item import Item

from .recurrent import DEFECTS, PlainStates, caps

pytestmark = pytest.mark.usefixtures("one_thread")


def item(driver: type[PlainStates], rule: str, case: str) -> Item:
    """Return the item with this rule and this case."""
    return next(one for one in questions(caps(driver)) if (one.rule, one.case.id) == (rule, case))


def test_item_ids_are_unique_and_every_rule_has_an_item() -> None:
    """No two items share an id."""
    found = questions(caps())
    assert len({one.id for one in found}) == len(found) > 100
    assert {one.rule for one in found} == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_correct_layer_passes(rule: str) -> None:
    """A correct layer passes every third item of each rule."""
    for one in [one for one in questions(caps()) if one.rule == rule][::3]:
        one.run()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.__name__)
def test_defect_is_found_by_its_rule(defect: type[PlainStates]) -> None:
    """The item of the named rule fails on the defect and passes on the correct layer."""
    rule, case = DEFECTS[defect]
    item(PlainStates, rule, case).run()
    with pytest.raises(ContractViolation) as caught:
        item(defect, rule, case).run()
    assert caught.value.details["batch"] is not None


def test_every_rule_has_a_defect() -> None:
    """Every rule has a defect that its items find."""
    assert {rule for rule, _ in DEFECTS.values()} == set(RULES)


def test_violation_tells_the_rounds() -> None:
    """The message lists what happened before the wrong value, in order."""
    with pytest.raises(ContractViolation) as caught:
        item(*_first_defect()).run()
    said = str(caught.value)
    assert said.index("request 0 starts") < said.index("prefill of 9") < said.index("verify of 4")


def _first_defect() -> tuple[type[PlainStates], str, str]:
    defect = next(one for one in DEFECTS if one.__name__ == "WindowStays")
    return (defect, *DEFECTS[defect])
