"""Decides each theorem about a plugin's sizing: proved, refuted, restated, or undecided.

A refutation counts only if the plugin's own `buffers()` shows the shortage on the model's plain integers. An undecided
theorem fails. A claim that is proved only for the listed draft shapes is restated: it claims nothing for other shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import z3

from draftmark_contract.sizing.batches import brief
from draftmark_contract.sizing.required_sizes import RequiredSize, required_sizes_of

from .domain import DRAFTS, bounded, fixed, plain_batch, plain_geometry
from .problem import definitions, hints, relevant, renumbered, smt2
from .solver import Answer, Solver
from .symbols import Context
from .theorems import VARIANTS, Claim, Plan, Theorem, plan_of

if TYPE_CHECKING:
    from draftmark_contract.backend_under_test import BackendUnderTest

Within = int | dict[str, int] | None
"""Constraint on inputs: an upper bound for all, or fixed values for some."""
SHORT, LONG = 10_000_000, 30_000_000
"""Limits of a query in z3's resource units: about 3 and 10 seconds. Proofs need at most 2 seconds."""
_Z3 = threading.Lock()
"""Lock for z3 terms, which are not thread-safe: one thread at a time makes and frees them. Workers solve them."""
LADDER = (3, 9, 40, 300, None)
SHAPES = ((1, 1, 1), (1, 4, 4), (2, 3, 7), (4, 3, 8), (8, 5, 64), (8, 9, 33))
"""(k, S, D) for which a claim is tried if it cannot be decided for all draft shapes."""


class Status(StrEnum):
    """Outcome of a theorem. PROVED, RESTATED, SWEPT and REFUSED do not fail."""

    PROVED = "proved"
    RESTATED = "restated"
    SWEPT = "swept"
    """Only usage() can compute the size: a sweep over edge cases checks it instead of a proof."""
    REFUSED = "refused"
    REFUTED = "refuted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Proof:
    """Holds the outcome of one theorem.

    Attributes:
        variant: served modes, and overlap.
        theorem: name of the theorem.
        role: role of the buffer.
        claim: ``needed <= declared`` in words.
        status: outcome.
        note: counterexample, restated range, or the reason why it is undecided.
    """

    variant: str
    theorem: str
    role: str
    claim: str
    status: Status
    note: str = ""

    @property
    def fails(self) -> bool:
        """True if this outcome fails the contract."""
        return self.status in (Status.REFUTED, Status.UNDECIDED)


def prove_all(subject: BackendUnderTest, workers: int = 2) -> list[Proof]:
    """Prove every theorem about one backend."""
    return [proof for variant in VARIANTS for proof in prove_plan(subject, plan_of(subject, variant), workers)]


def prove_plan(subject: BackendUnderTest, plan: Plan, workers: int = 2) -> list[Proof]:
    """Prove the theorems of one variant (served modes and overlap), `workers` at a time."""
    name = str(plan.variant)
    if plan.refused:
        return [Proof(name, "all buffers", "", "", Status.REFUSED, "; ".join(plan.refused))]
    if plan.obstacle:
        return [Proof(name, "all buffers", "", "needed <= declared", Status.UNDECIDED, plan.obstacle)]
    parts = [plan.theorems[start::workers] for start in range(workers)]
    batches = _Batches()
    with ThreadPoolExecutor(workers) as pool:
        done = [proof for part in pool.map(lambda part: _prove_part(subject, part, batches), parts) for proof in part]
    order = {theorem.name: position for position, theorem in enumerate(plan.theorems)}
    proofs = sorted(done, key=lambda proof: order[proof.theorem])
    swept = [Proof(name, buffer, "", "usage() <= declared", Status.SWEPT, "see sizing.covers") for buffer in plan.swept]
    return [*proofs, *swept]


class _Batches:
    """Caches whether any batch satisfies the assumptions of a claim. Buffers of one path and mode share the result."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self._lock = threading.Lock()

    def exist(self, claims: Iterable[Claim], solver: Solver) -> bool:
        """Return True if a batch satisfies the assumptions of some claim. If none does, a proof would be vacuous."""
        with self._lock:
            return any(self._exists(claim, solver) for claim in claims)

    def _exists(self, claim: Claim, solver: Solver) -> bool:
        # The plan keeps its contexts alive, so each id stays unique. All claims of one context have the same
        # assumptions.
        key = id(claim.context)
        if key not in self._known:
            self._known[key] = _satisfiable(claim, solver)
        return self._known[key]


def _prove_part(subject: BackendUnderTest, theorems: Iterable[Theorem], batches: _Batches) -> list[Proof]:
    with Solver() as solver:
        return [_prove(subject, theorem, solver, batches) for theorem in theorems]


def _prove(subject: BackendUnderTest, theorem: Theorem, solver: Solver, batches: _Batches) -> Proof:
    statuses = [status for alike in _alike(theorem.claims) for status in _decide_alike(subject, theorem, alike, solver)]
    if not batches.exist(theorem.claims, solver):
        statuses = [(Status.UNDECIDED, "no batch satisfies the assumptions: the proof would be empty")]
    worst = (Status.REFUTED, Status.UNDECIDED, Status.RESTATED, Status.PROVED)
    status, note = min(statuses, key=lambda pair: worst.index(pair[0]))
    return Proof(str(theorem.variant), theorem.name, theorem.role, theorem.text, status, note)


def _alike(claims: Iterable[Claim]) -> list[tuple[str, list[Claim]]]:
    """Group claims that differ only in the conditions of their path. Return each group with its SMT-LIB text."""
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        with _Z3:
            question = _question(replace(claim, assumed=[]), "native", True, None)
        found.setdefault(renumbered(question), []).append(claim)
    return list(found.items())


def _decide_alike(
    subject: BackendUnderTest, theorem: Theorem, alike: tuple[str, list[Claim]], solver: Solver
) -> list[tuple[Status, str]]:
    """Prove a group's goals without path conditions, which covers all paths. If that fails, decide each claim."""
    question, claims = alike
    if len(claims) > 1 and solver.ask(question, [], SHORT).status == "unsat":
        return [(Status.PROVED, "")] * len(claims)
    return [_decide(subject, theorem, claim, solver) for claim in claims]


def _decide(subject: BackendUnderTest, theorem: Theorem, claim: Claim, solver: Solver) -> tuple[Status, str]:
    answers = []
    for encoding, hinted, effort in (("native", True, SHORT), ("skolem", True, LONG), ("native", False, SHORT)):
        answers.append(ask(claim, solver, encoding, hinted, effort))
        if answers[-1].status == "unsat":
            return Status.PROVED, ""
        if answers[-1].status == "sat":
            break
    note = _refute(subject, theorem, claim, solver)
    if note:
        return note
    return _restate(claim, solver)


def ask(claim: Claim, solver: Solver, encoding: str, hinted: bool, effort: int, within: Within = None) -> Answer:
    """Search, with z3, for a batch within the limits that violates a goal of the claim."""
    with _Z3:
        question = _question(claim, encoding, hinted, within)
    return solver.ask(question, list(claim.context.inputs), effort)


def _question(claim: Claim, encoding: str, hinted: bool, within: Within) -> str:
    """Return the claim's negation as SMT-LIB text. The caller must have locked `_Z3`: z3 terms are not thread-safe."""
    context = relevant(claim.context, [*claim.goals, *claim.assumed])
    facts = _facts(context, claim, encoding, within)
    return smt2([*facts, *(hints(context) if hinted else []), z3.Not(z3.And(*claim.goals))])


def _facts(context: Context, claim: Claim, encoding: str, within: Within) -> list[Any]:
    extra = bounded(context, within) if isinstance(within, int) else fixed(context, within) if within else []
    return [*context.facts, *claim.assumed, *definitions(context, encoding), *extra]


def _satisfiable(claim: Claim, solver: Solver) -> bool:
    """Return True if some batch satisfies the assumptions.

    Definitions of other terms are left out: each has a value in every batch, because a theorem proves the divisors.
    """
    for bound in LADDER:
        with _Z3:
            context = relevant(claim.context, claim.assumed)
            problem = smt2(_facts(context, claim, "skolem", bound))
        if solver.ask(problem, [], SHORT).status == "sat":
            return True
    return False


def _refute(subject: BackendUnderTest, theorem: Theorem, claim: Claim, solver: Solver) -> tuple[Status, str] | None:
    """Return the status and text of the smallest counterexample, checked on plain integers; None if there is none."""
    unreplayed = ""
    for bound in LADDER:
        answer = ask(claim, solver, "native", False, SHORT, bound)
        if answer.status == "sat":
            shown = replay(subject, theorem, answer.model)
            if shown:
                return Status.REFUTED, shown
            unreplayed = f"a model did not replay on plain integers: {answer.model}"
    return (Status.UNDECIDED, unreplayed) if unreplayed else None


def _restate(claim: Claim, solver: Solver) -> tuple[Status, str]:
    proved: list[tuple[int, ...]] = []
    missing: list[tuple[int, ...]] = []
    for shape in SHAPES:
        at = dict(zip(DRAFTS, shape, strict=True))
        decided = any(ask(claim, solver, encoding, True, SHORT, at).status == "unsat" for encoding in _ENCODINGS)
        (proved if decided else missing).append(shape)
    if missing:
        return Status.UNDECIDED, f"z3 decides neither the claim nor (k,S,D) in {missing}; simplify the formula"
    return Status.RESTATED, f"proved at (k,S,D) in {', '.join(map(str, proved))}; not claimed elsewhere"


_ENCODINGS = ("native", "skolem")


def replay(subject: BackendUnderTest, theorem: Theorem, model: dict[str, int]) -> str:
    """Run the plugin's sizing on the integers of a z3 model. Return the shortage as text; "" if there is none."""
    try:
        geometry = plain_geometry(theorem.variant, subject.profile, model)
        if subject.backend.supports(geometry):
            return ""
        specs = {spec.name: spec for spec in subject.buffers(geometry)}
        metadata = subject.layouts(geometry)
    except Exception as error:  # The error is probably a division by zero, which refutes a theorem about divisors.
        return f"{type(error).__name__}: {error} at {model}" if theorem.what == "divisors" else ""
    if theorem.mode is None or theorem.buffer not in specs:
        return ""
    batch = plain_batch(geometry, theorem.mode, model)
    short = [
        need for need in required_sizes_of(specs[theorem.buffer], batch, geometry, metadata) if _short(need, theorem)
    ]
    if not short:
        return ""
    need = short[0]
    return f"{need.needed} > {need.declared} at {batch}; geometry {brief(geometry)}"


def _short(need: RequiredSize, theorem: Theorem) -> bool:
    return need.what == theorem.what and bool(need.needed > need.declared)
