"""The common questions: a right backend passes them, and each defect is found by an item of its rule."""

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
    """One item by its name."""
    return next(one for one in questions(caps(driver)) if (one.rule, one.case) == (rule, case))


def test_items_have_ids_of_their_own_and_rules_of_the_contract() -> None:
    """No id is given twice, and each rule has a number."""
    ids = [one.id for one in questions(caps(slow=False))]
    assert len(set(ids)) == len(ids) > 300
    assert set(RULES) <= set(rules())


@pytest.mark.parametrize("rule", RULES)
def test_a_right_backend_is_right(rule: str) -> None:
    """Of each rule, every seventh item; what it refuses is not served."""
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
def test_a_defect_is_found_by_its_rule(defect: type[PagedDriver]) -> None:
    """The item that fails on the defect passes on the right backend."""
    rule, case = DEFECTS[defect]
    item(PagedDriver, rule, case).run()
    with pytest.raises(ContractViolation) as caught:
        item(defect, rule, case).run()
    assert caught.value.details["batch"] is not None


def test_defects_cover_the_rules() -> None:
    """Every rule that is asked has a defect that its items find, but for those whose items repeat another's on more."""
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
    """Declares that it serves no full graph."""

    capturable = Capturable.NONE


class OneRow(PagedDriver):
    """Declares graphs of decodes alone."""

    capturable = Capturable.ONE_ROW


def test_graphs_that_are_not_declared_are_not_served() -> None:
    """The reason says what the backend declares; what it declares is asked."""
    with pytest.raises(NotServed, match="declares NONE"):
        item(NoGraphs, "graphs.replay_equals_eager", "fp32-decode").run()
    with pytest.raises(NotServed, match="declares ONE_ROW"):
        item(OneRow, "graphs.replay_equals_eager", "fp32-verify").run()
    item(OneRow, "graphs.captured_run_is_right", "fp32-decode").run()
