"""Tests of the common items: a correct backend passes, and an item of the right rule finds each defect."""

from __future__ import annotations

import pytest

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.driver import Capturable
from draftmark_contract.judge.item import Item, NotServed
from draftmark_contract.judge.questions import questions
from draftmark_contract.judge.rules import rules

from .defects import DEFECTS
from .paged import PagedDriver, caps

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = sorted({item.rule for item in questions(caps())})


def item(driver: type[PagedDriver], rule: str, case: str) -> Item:
    """Return one item by rule and case."""
    return next(one for one in questions(caps(driver)) if (one.rule, one.case) == (rule, case))


def test_item_ids_are_unique_and_rules_are_numbered() -> None:
    """No two items share an id, and each rule has a number."""
    ids = [one.id for one in questions(caps(slow=False))]
    assert len(set(ids)) == len(ids) > 300
    assert set(RULES) <= set(rules())


@pytest.mark.parametrize("rule", RULES)
def test_correct_backend_passes(rule: str) -> None:
    """Every seventh item of each rule passes on a correct backend, or the backend does not serve it."""
    mine = [one for one in questions(caps()) if one.rule == rule]
    ended = []
    for one in mine[::7]:
        try:
            one.run()
            ended.append("right")
        except NotServed as error:
            assert "head_size" in str(error)
    assert "right" in ended


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.__name__)
def test_defect_is_found_by_its_rule(defect: type[PagedDriver]) -> None:
    """The item that fails on the defect passes on the correct backend."""
    rule, case = DEFECTS[defect]
    item(PagedDriver, rule, case).run()
    with pytest.raises(ContractViolation) as caught:
        item(defect, rule, case).run()
    assert caught.value.details["batch"] is not None


def test_every_rule_has_a_defect() -> None:
    """Every rule has a defect that its items find, except rules that repeat another rule's items on more inputs."""
    more = {
        "numerics.survive_any_logits",
        "production.every_head_shape_is_right",
        "production.a_common_prefix_is_right",
    }
    more |= {
        "production.padding_may_be_most",
        "graphs.capture_order_does_not_matter",
        "graphs.keys_are_closed_under_padding",
    }
    assert set(RULES) - {rule for rule, _ in DEFECTS.values()} == more


class NoGraphs(PagedDriver):
    """Declares that no full graph is supported."""

    capturable = Capturable.NONE


class OneRow(PagedDriver):
    """Declares full graphs for decode only."""

    capturable = Capturable.ONE_ROW


def test_undeclared_graphs_are_not_served() -> None:
    """An undeclared graph is not served, and the reason names what the backend declares."""
    with pytest.raises(NotServed, match="declares NONE"):
        item(NoGraphs, "graphs.replay_equals_eager", "fp32-decode").run()
    with pytest.raises(NotServed, match="declares ONE_ROW"):
        item(OneRow, "graphs.replay_equals_eager", "fp32-verify").run()
    item(OneRow, "graphs.captured_run_is_right", "fp32-decode").run()
