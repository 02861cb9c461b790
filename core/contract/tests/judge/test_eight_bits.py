"""Tests of judging engines that round queries to fp8: rounding is allowed, and defects are still found."""

from __future__ import annotations

import pytest

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.questions import questions

from .in_eight_bits import ForgetsAKey, InEightBits, NoValueScale, QueriesInHalfThePrecision, Undeclared
from .paged import PagedDriver, caps

pytestmark = pytest.mark.usefixtures("one_thread")
KV8 = [one.case.id for one in questions(caps()) if one.rule.startswith("numerics.") and "kv8" in one.id]


def run(driver: type[PagedDriver], text: str, rule: str = "numerics.") -> list[str]:
    """Run the items with this rule prefix and this text in the case; return ids of the wrong ones."""
    wrong = []
    for one in questions(caps(driver)):
        if one.rule.startswith(rule) and text in one.case.id:
            try:
                one.run()
            except ContractViolation:
                wrong.append(one.id)
    return wrong


def test_declared_e4m3_products_are_right() -> None:
    """A backend that declares its rounded queries passes every fp8 item; undeclared, TRITON_ATTN fails 17 on H200."""
    assert len(KV8) > 20
    assert run(InEightBits, "kv8") == []


def test_undeclared_rounding_is_wrong() -> None:
    """A backend that rounds but does not declare the rounding fails items with large logits or small weights."""
    wrong = run(Undeclared, "kv8")
    assert len(wrong) > 12
    assert "numerics.survive_any_logits[bf16-gqa4-window-kv8-chunk]" in wrong
    assert "numerics.match_float64[bf16-gqa4-128-kv8-prefill]" in wrong


@pytest.mark.parametrize("defect", [NoValueScale, ForgetsAKey, QueriesInHalfThePrecision])
def test_defect_is_found_despite_rounding(defect: type[InEightBits]) -> None:
    """The wider bounds for e4m3 do not hide a missing scale, a missing key, or a second rounding of the queries."""
    assert run(defect, "kv8")
