"""Theorems about recurrent layers: z3 proves the sizes of slots, records and snapshots, and refutes false ones."""

from __future__ import annotations

import pytest

from draftmark_proof.prover import Status
from draftmark_proof.states import FALSE, THEOREMS, Round, decide_round

LONG = [name for name in THEOREMS if name.startswith(("records of", "snapshots")) and "per key" not in name]
"""Statements that z3 proves in a second or more; a quick run has one of this kind."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in THEOREMS])
def test_a_true_statement_is_proved(name: str) -> None:
    """z3 proves each theorem for all heads, elements, kernels, layers, requests and rows."""
    status, _ = decide_round(THEOREMS[name])
    assert status is Status.PROVED


@pytest.mark.parametrize("name", FALSE)
def test_a_false_statement_is_refuted(name: str) -> None:
    """z3 finds a round that violates the statement, and plain integers confirm it."""
    status, answer = decide_round(FALSE[name])
    assert status is Status.REFUTED
    found = Round.__new__(Round)
    names = {"max_num_reqs": "max_num_reqs", "captured": "captured", "nodes": "D", "requests": "R", "request": "r"}
    names |= {"rows": "q", "row": "t", "count": "count", "layers": "layers", "layer": "layer"}
    for attribute, symbol in names.items():
        setattr(found, attribute, answer.model[symbol])
    assert FALSE[name](found) is False
    assert found.row < found.rows <= found.nodes and found.count <= found.rows


def test_assumptions_hold_for_some_round() -> None:
    """No theorem is empty: a false goal under the same assumptions is refuted, not proved."""
    status, _ = decide_round(lambda one: one.rows < one.rows)
    assert status is Status.REFUTED
