"""Tests of the items of `draftmark judge`: a correct backend passes, and the right rule finds each defect."""

from __future__ import annotations

import pytest

from draftmark_contract.check import ContractViolation, Refused
from draftmark_contract.judge.driver import Capturable
from draftmark_contract.judge.questions import questions
from draftmark_contract.judge.rules import rules
from draftmark_contract.runner.item import Item

from .defects import DEFECTS
from .paged import PagedDriver, caps

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = sorted({item.rule for item in questions(caps())})


def item(driver: type[PagedDriver], rule: str, case: str) -> Item:
    """Return the item with this rule and this case."""
    return next(one for one in questions(caps(driver)) if (one.rule, one.case.id) == (rule, case))


def test_item_ids_are_unique_and_rules_are_numbered() -> None:
    """No two items share an id, and each rule has a number."""
    ids = [one.id for one in questions(caps(slow=False))]
    assert len(set(ids)) == len(ids) > 300
    assert set(RULES) <= set(rules())


@pytest.mark.parametrize("rule", RULES)
def test_correct_backend_passes(rule: str) -> None:
    """A correct backend passes every seventh item of each rule, except items that it declares as not served."""
    mine = [one for one in questions(caps()) if one.rule == rule]
    ended = []
    for one in mine[::7]:
        try:
            one.run()
            ended.append("right")
        except Refused as error:
            assert "head_size" in str(error)
    assert "right" in ended


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.__name__)
def test_defect_is_found_by_its_rule(defect: type[PagedDriver]) -> None:
    """The item of the named rule fails on the defect and passes on the correct backend."""
    rule, case = DEFECTS[defect]
    item(PagedDriver, rule, case).run()
    with pytest.raises(ContractViolation) as caught:
        item(defect, rule, case).run()
    assert caught.value.details["batch"] is not None


def test_every_rule_has_a_defect() -> None:
    """Every rule has a defect that its items find, except rules that repeat another rule's items on further inputs."""
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
    """Backend that declares no support of full CUDA graphs."""

    capturable = Capturable.NONE


class OneRow(PagedDriver):
    """Backend that declares support of full CUDA graphs for decode only (one row per request)."""

    capturable = Capturable.ONE_ROW


def test_undeclared_graphs_are_not_served() -> None:
    """An item with a graph that the backend does not declare is not served, and the reason names the declaration."""
    with pytest.raises(Refused, match="declares NONE"):
        item(NoGraphs, "graphs.replay_equals_eager", "fp32-decode").run()
    with pytest.raises(Refused, match="declares ONE_ROW"):
        item(OneRow, "graphs.replay_equals_eager", "fp32-verify").run()
    item(OneRow, "graphs.captured_run_is_right", "fp32-decode").run()
