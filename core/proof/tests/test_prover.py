"""Tests of proof statuses: no vacuous proof, refutations confirmed on integers, undecided claims fail."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from draftmark import load
from draftmark.buffers import BufferSpec
from draftmark.geometry import Geometry, ceil_div
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Refused, Tier, all_checks
from draftmark_contract.layouts import Layout
from draftmark_contract.roles import Role
from draftmark_contract.runner.item import Item, run_item
from draftmark_contract.runner.outcome import Outcome
from draftmark_contract.sizing.proofs import lack_of_proofs
from draftmark_proof import prover
from draftmark_proof.prover import Proof, Status, prove_all, prove_plan
from draftmark_proof.solver import Answer, Solver
from draftmark_proof.table import proof_table
from draftmark_proof.theorems import VARIANTS, plan_of
from draftmark_testing.sizing_backends import NAMES, correct, level_of, one, subject_of, two_level_subject, two_levels

LEVEL = level_of(Layout.PAGE_TABLE)
TARGET, OVERLAP = VARIANTS[0], VARIANTS[1]


def _lens(formula: Any) -> BackendUnderTest:
    """Return a backend with one buffer, kv_lens, of the size that `formula` gives."""

    def buffers(g: Geometry) -> list[BufferSpec]:
        return [one(Role.KV_LENS, (formula(g),))]

    return subject_of(buffers, LEVEL)


def _prove(subject: BackendUnderTest, variant: Any = TARGET) -> list[Proof]:
    return prove_plan(subject, plan_of(subject, variant), workers=1)


def _statuses(subject: BackendUnderTest) -> set[Status]:
    return {proof.status for proof in _prove(subject)}


QUICK = ("reference",)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in ("reference", *NAMES)]
)
def test_correct_sizing_is_proved(name: str) -> None:
    """Sizes of all buffers with standard roles are proved for five correct backends."""
    subject = correct(name) if name in NAMES else BackendUnderTest(load(name), "cpu", Tier.SIZING)
    proofs = prove_all(subject)
    assert {proof.status for proof in proofs} == {Status.PROVED}, proof_table(name, proofs)


def test_plain_max_and_if_are_explored() -> None:
    """A size that branches with Python's `max` and `if` is proved separately for each path."""

    def size(g: Geometry) -> Any:
        largest = max(g.limits.max_num_reqs, *g.limits.capture_batch_sizes)
        return largest if g.draft.num_draft_tokens > 1 else g.max_reqs

    assert _statuses(_lens(size)) == {Status.PROVED}


def test_one_wrong_path_refutes() -> None:
    """If a size is wrong on one branch only, the proof refutes it with a value of that branch."""
    proofs = _prove(_lens(lambda g: g.max_reqs if g.draft.topk < 7 else g.limits.max_num_reqs))
    assert {proof.status for proof in proofs} == {Status.REFUTED}
    assert all("k=7" in proof.note for proof in proofs)


def test_unprovable_operation_is_undecided() -> None:
    """A size with math.ceil of a quotient is undecided, and the message names ceil_div as the replacement."""
    [proof] = _prove(_lens(lambda g: math.ceil(g.max_reqs / 1)))
    assert proof.status is Status.UNDECIDED
    assert proof.fails
    assert "ceil_div" in proof.note


def test_plugin_error_on_symbols_is_undecided() -> None:
    """If sizing code raises an error on symbolic integers, the proof is undecided."""
    [proof] = _prove(_lens(lambda g: {}["missing"]))
    assert proof.status is Status.UNDECIDED
    assert "KeyError" in proof.note


def test_divisor_that_may_be_zero_is_refuted() -> None:
    """A division by num_steps - 1 is refuted: num_steps = 1 makes it undefined, so later claims would be vacuous."""
    proofs = _prove(_lens(lambda g: g.max_reqs + g.draft.topk // (g.draft.num_steps - 1)))
    divisors = [proof for proof in proofs if "divisors" in proof.theorem]
    assert {proof.status for proof in divisors} == {Status.REFUTED}
    assert "ZeroDivisionError" in divisors[0].note


def test_refused_geometries_are_not_claimed() -> None:
    """A geometry that supports() refuses is no counterexample; if it refuses all, the proof has status REFUSED."""
    wrong_above_one = _lens(lambda g: g.max_reqs if g.draft.topk == 1 else 1)
    assert Status.REFUTED in _statuses(wrong_above_one)

    def buffers(g: Geometry) -> list[BufferSpec]:
        return [one(Role.KV_LENS, (ceil_div(g.max_reqs, g.draft.topk),))]

    chain = subject_of(buffers, LEVEL, supports=lambda g: [] if g.draft.topk == 1 else ["topk above 1 is not served"])
    assert _statuses(chain) == {Status.PROVED}
    none = subject_of(buffers, LEVEL, supports=lambda g: ["nothing is served at all"])
    assert _statuses(none) == {Status.REFUSED}


def test_unconfirmed_refutation_is_undecided() -> None:
    """If plain integers do not confirm a counterexample, the claim is undecided."""
    proofs = _prove(_lens(lambda g: 100_000 if isinstance(g.max_reqs, int) else g.limits.max_num_reqs))
    assert {proof.status for proof in proofs} == {Status.UNDECIDED}
    assert "did not replay" in proofs[0].note


def test_restated_claim_names_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the solver z3 decides a claim only for fixed draft shapes, the result names these shapes."""
    ask = prover.ask

    def only_fixed(claim: Any, solver: Any, encoding: str, hinted: bool, effort: int, within: Any = None) -> Answer:
        fixed = isinstance(within, dict)
        return ask(claim, solver, encoding, hinted, effort, within) if fixed else Answer("unknown")

    monkeypatch.setattr(prover, "ask", only_fixed)
    proofs = _prove(_lens(lambda g: g.max_reqs))
    assert {proof.status for proof in proofs} == {Status.RESTATED}
    assert "(4, 3, 8)" in proofs[0].note and "not claimed elsewhere" in proofs[0].note


def test_nothing_decided_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the solver answers "unknown" to everything, the claim is undecided, which counts as failed."""
    monkeypatch.setattr(prover, "ask", lambda *args, **kwargs: Answer("unknown"))
    assert all(proof.fails for proof in _prove(_lens(lambda g: g.max_reqs)))


@pytest.mark.parametrize(("effort", "cpu_seconds"), [(100_000, 600), (2**31, 1)], ids=["steps", "processor-time"])
def test_overrunning_query_is_unknown(effort: int, cpu_seconds: int) -> None:
    """A query over its limit of steps or processor time is unknown, and the solver still answers the next query."""
    hard = "(declare-const x Int)(declare-const y Int)(declare-const z Int)"
    hard += "(assert (and (> x 2) (> y 2) (> z 2) (= (+ (* x x x x x) (* y y y y y)) (* z z z z z))))"
    with Solver() as solver:
        assert solver.ask(hard, ["x"], effort, cpu_seconds) == Answer("unknown")
        assert solver.ask("(declare-const x Int)(assert (= x 4))", ["x"], prover.SHORT) == Answer("sat", {"x": 4})


def test_answers_do_not_depend_on_earlier_queries() -> None:
    """A query has the same answer and model in a new solver process and after other queries."""
    query, names = "(declare-const x Int)(declare-const y Int)(assert (< 3 x (* y y) 90))", ["x", "y"]
    with Solver() as solver:
        first = solver.ask(query, names, prover.SHORT)
        solver.ask("(declare-const y Int)(assert (> (* y y y) 77))", ["y"], prover.SHORT)
        assert solver.ask(query, names, prover.SHORT) == first
        assert first.status == "sat"


def test_item_shows_the_counterexample() -> None:
    """A failed proof item prints the theorem, the batch and the numbers; a refused one raises `Refused`."""
    check = next(check for check in all_checks() if check.name == "proof.needed_is_declared")
    subject = _lens(lambda g: g.limits.max_num_reqs)
    with pytest.raises(ContractViolation, match=r"kv_lens entries, extend: refuted[^$]*\d > \d at extend: ") as failure:
        check.run(subject, check.cases()[0])
    assert "max_reqs" not in str(failure.value.details["batch"])
    refusing = subject_of(lambda g: [], LEVEL, supports=lambda g: ["nothing is served at all"])
    with pytest.raises(Refused):
        check.run(refusing, check.cases()[0])


@pytest.mark.parametrize("package", ["draftmark_proof", "z3"])
def test_items_without_the_proofs_are_unjudged(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item by proof says nothing about a backend where draftmark-proof or z3 is not installed."""
    monkeypatch.setitem(sys.modules, package, None)
    lack_of_proofs.cache_clear()
    subject = BackendUnderTest(load("reference"), "cpu", Tier.SIZING)
    proofs = ("proof.needed_is_declared", "state_sizing.largest_batch_covers_all")
    checks = [one for one in all_checks() if one.name in proofs]
    results = [run_item(Item(one, one.cases()[0]), subject) for one in checks]
    lack_of_proofs.cache_clear()
    assert [one.outcome for one in results] == [Outcome.UNJUDGED] * 2, results
    assert all(f"proofs need {package}, which is not installed: pip install" in one.message for one in results)


def test_proof_finds_what_sweeps_miss() -> None:
    """A size that is wrong for one context length only passes all sweeps over examples, and the proof refutes it."""
    subject = _lens(lambda g: g.max_reqs - 1 if g.limits.max_context_len == 77_777 else g.max_reqs)
    checks = {check.name: check for check in all_checks()}
    for name in ("sizing.covers", "sizing.covers_shapes", "sizing.covers_random", "tightness.index_buffers"):
        for case in checks[name].cases()[::9]:
            checks[name].run(subject, case)
    proof = checks["proof.needed_is_declared"]
    with pytest.raises(ContractViolation, match="C=77777"):
        proof.run(subject, proof.cases()[0])


def test_extend_tail_is_bounded_by_its_rows() -> None:
    """Tail buffers sized only for graph modes are refuted for EXTEND, with a batch within the limits."""

    def graph_modes_only(g: Geometry) -> list[BufferSpec]:
        return [
            replace(spec, shape=(g.max_reqs * g.max_tail,)) if spec.name == "tail_indices" else spec
            for spec in two_levels(g)
        ]

    proofs = _prove(two_level_subject(graph_modes_only))
    [refuted] = [proof for proof in proofs if proof.status is not Status.PROVED]
    assert (refuted.theorem, refuted.status) == ("tail_indices entries, extend", Status.REFUTED)
