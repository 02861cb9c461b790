"""Where an engine rounds queries to fp8 on purpose, they are judged as rounded, and defects still show."""

from __future__ import annotations

import pytest

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.questions import questions

from .in_eight_bits import ForgetsAKey, InEightBits, NoValueScale, QueriesInHalfThePrecision, Undeclared
from .paged import PagedDriver, caps

pytestmark = pytest.mark.usefixtures("one_thread")
KV8 = [one.case for one in questions(caps()) if one.rule.startswith("numerics.") and "kv8" in one.case]


def run(driver: type[PagedDriver], text: str, rule: str = "numerics.") -> list[str]:
    """Items of such a name that are wrong."""
    wrong = []
    for one in questions(caps(driver)):
        if one.rule.startswith(rule) and text in one.case:
            try:
                one.run()
            except ContractViolation:
                wrong.append(one.id)
    return wrong


def test_products_in_e4m3_are_right_where_they_are_declared() -> None:
    """Every item of fp8 KV, large logits among them: the H200's TRITON_ATTN failed 17 of these by this alone."""
    assert len(KV8) > 20
    assert run(InEightBits, "kv8") == []


def test_undeclared_rounding_is_wrong() -> None:
    """The same backend, judged for the queries it was given, is far off where logits are large or weights small."""
    wrong = run(Undeclared, "kv8")
    assert len(wrong) > 12
    assert "numerics.survive_any_logits[bf16-gqa4-window-kv8-chunk]" in wrong
    assert "numerics.match_float64[bf16-gqa4-128-kv8-prefill]" in wrong


@pytest.mark.parametrize("defect", [NoValueScale, ForgetsAKey, QueriesInHalfThePrecision])
def test_a_defect_shows_beside_the_rounding(defect: type[InEightBits]) -> None:
    """The room for e4m3 is smaller than a scale, a key, or one more rounding."""
    assert run(defect, "kv8")
