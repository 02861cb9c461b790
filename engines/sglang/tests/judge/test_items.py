"""What SGLang's backends are asked."""

from __future__ import annotations

import importlib.util

import pytest

from draftmark_contract.judge.rules import rules
from draftmark_sglang.judge import questions
from draftmark_sglang.judge.engine import ENGINE, LEFT_OUT
from draftmark_sglang.judge.items import _questions
from draftmark_sglang.judge.setups import SETUPS


@pytest.mark.parametrize("info", ENGINE.targets(), ids=lambda info: info.name)
def test_each_item_asks_a_rule_of_the_contract(info) -> None:  # type: ignore[no-untyped-def]
    """Under an id of its own; and making items imports no SGLang."""
    items = ENGINE.open(info.name, "cpu").items()
    ids = [item.id for item in items]
    assert items and len(ids) == len(set(ids))
    assert {item.rule for item in items} <= set(rules())


def test_each_question_is_there() -> None:
    """The station finds what an item names."""
    asked = {name for setup in SETUPS.values() for _, _, name, _, _ in _questions(setup)}
    assert asked and all(callable(getattr(questions, name)) for name in asked)


def test_reasons_name_modules_of_rules() -> None:
    """Each reason for what is left out reaches some rule."""
    assert set(LEFT_OUT) <= {name.partition(".")[0] for name in rules()}


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_without_sglang_the_targets_are_listed_all_the_same() -> None:
    """And the engine says that it is not installed."""
    assert ENGINE.version() is None and len(ENGINE.targets()) == 7
