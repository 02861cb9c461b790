"""What SGLang's backends are asked."""

from __future__ import annotations

import importlib.util
import pickle

import pytest

from draftmark_contract.judge.rules import rules
from draftmark_sglang.judge import questions
from draftmark_sglang.judge.driver import as_it_is
from draftmark_sglang.judge.engine import ENGINE, LEFT_OUT
from draftmark_sglang.judge.items import _questions
from draftmark_sglang.judge.setups import SETUPS, heads_on
from draftmark_sglang.judge.station import _serve

ON = [(info.name, device) for info in ENGINE.targets() for device in info.devices]


@pytest.mark.parametrize(("target", "device"), ON, ids="-".join)
def test_each_item_asks_a_rule_of_the_contract(target: str, device: str) -> None:
    """Under an id of its own, on each device; and making items imports no SGLang."""
    items = ENGINE.open(target, device).items()
    ids = [item.id for item in items]
    assert items and len(ids) == len(set(ids))
    assert {item.rule for item in items} <= set(rules())


def test_each_question_is_there() -> None:
    """The station finds what an item names."""
    asked = {name for setup in SETUPS.values() for _, _, name, _, _ in _questions(setup)}
    assert asked and all(callable(getattr(questions, name)) for name in asked)


def test_on_a_gpu_nothing_is_interpreted() -> None:
    """The process there has none of what lets SGLang run on a CPU, and numbers that compiled kernels take."""
    assert set(ENGINE.environment("fa3", "cuda:0")) == {"OMP_NUM_THREADS", "SGLANG_PLUGINS"}
    assert heads_on("cuda:0").dtype == "bfloat16" and heads_on("cpu").dtype == "float32"


def test_what_a_spawned_station_is_given_is_taken_by_pickle() -> None:
    """Where CUDA is in use a process is spawned, not forked."""
    assert pickle.loads(pickle.dumps((_serve, as_it_is))) == (_serve, as_it_is)


def test_reasons_name_modules_of_rules() -> None:
    """Each reason for what is left out reaches some rule."""
    assert set(LEFT_OUT) <= {name.partition(".")[0] for name in rules()}


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_without_sglang_the_targets_are_listed_all_the_same() -> None:
    """And the engine says that it is not installed."""
    assert ENGINE.version() is None and len(ENGINE.targets()) == 8
