"""Tests of judging engines that round queries to fp8: rounding is allowed, and defects are still found."""

from __future__ import annotations

import pytest

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.questions import questions

from .in_eight_bits import ForgetsAKey, InEightBits, NoValueScale, QueriesInHalfThePrecision, Undeclared
from .paged import PagedDriver, caps

pytestmark = pytest.mark.usefixtures("one_thread")
KV8 = [one.case for one in questions(caps()) if one.rule.startswith("numerics.") and "kv8" in one.case]


def run(driver: type[PagedDriver], text: str, rule: str = "numerics.") -> list[str]:
    """Return ids of wrong items with this text in their case and this prefix in their rule."""
    wrong = []
    for one in questions(caps(driver)):
        if one.rule.startswith(rule) and text in one.case:
            try:
                one.run()
            except ContractViolation:
                wrong.append(one.id)
    return wrong


def test_declared_e4m3_products_are_right() -> None:
    """Every item with fp8 KV passes if the driver declares rounded queries; else TRITON_ATTN on H200 fails 17."""
    assert len(KV8) > 20
    assert run(InEightBits, "kv8") == []


def test_undeclared_rounding_is_wrong() -> None:
    """Items with large logits or small weights fail if the driver does not declare the rounding."""
    wrong = run(Undeclared, "kv8")
    assert len(wrong) > 12
    assert "numerics.survive_any_logits[bf16-gqa4-window-kv8-chunk]" in wrong
    assert "numerics.match_float64[bf16-gqa4-128-kv8-prefill]" in wrong


@pytest.mark.parametrize("defect", [NoValueScale, ForgetsAKey, QueriesInHalfThePrecision])
def test_defect_is_found_despite_rounding(defect: type[InEightBits]) -> None:
    """The wider bounds for e4m3 do not hide a missing scale, a missing key, or a second rounding."""
    assert run(defect, "kv8")
