"""Proofs about recurrent state: a plugin's buffers hold the rows of every verify, for any layers, rows and requests.

A verify of R requests with q rows each keeps ``layers · R · q`` rows until its commit. R is at most the largest batch,
padded to a captured size, and q at most D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import z3

from draftmark.geometry import DraftShape, Limits, StateGeometry
from draftmark_contract.check import ContractViolation
from draftmark_contract.oracle.formulas import max_requests
from draftmark_contract.roles import with_roles
from draftmark_contract.sizing.batches import brief
from draftmark_contract.sizing.state import KEPT, least_bytes

from .explore import explore
from .prover import LONG, SHORT, ask
from .solver import Solver
from .symbols import Context, Sym, SymbolicUse
from .theorems import Claim

if TYPE_CHECKING:
    from draftmark_contract.backend_under_test import BackendUnderTest

CAPTURES = 2
"""Captured sizes of the symbolic limits."""
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def symbolic_geometry(geometry: StateGeometry, context: Context) -> StateGeometry:
    """Return the geometry with free layers, rows, requests, captured sizes and budgets. The layer's shape stays."""
    free: Callable[[str, int], Any] = context.variable
    captures = tuple(free(f"capture{i}", 1) for i in range(CAPTURES))
    limits = Limits(free("max_num_reqs", 1), free("C", 1), free("max_extend_tokens", 1), captures)
    if geometry.limits.row_budgets:
        limits = replace(limits, row_budgets=(free("budget", 1),))
    draft = DraftShape(geometry.draft.topk, geometry.draft.num_steps, free("D", 1))
    layers = free("layers", 1)
    return replace(geometry, limits=limits, draft=draft, num_layers=layers)


def assert_proved(subject: BackendUnderTest, geometry: StateGeometry) -> None:
    """Prove that the buffers of uncommitted rows hold the rows of every verify.

    Raises:
        ContractViolation: a batch needs more, z3 cannot decide it, or the sizing code cannot be followed.
    """
    try:
        paths = explore(lambda context: _sizes(subject, geometry, context))
    except SymbolicUse as obstacle:
        _fail(geometry, str(obstacle), "integer arithmetic with ceil_div, maximum and minimum")
    for path in paths:
        needed, declared = path.result
        goals = [needed.term <= _term(declared), *path.context.obligations()]
        claim = Claim(path.context, path.conditions, goals)
        with Solver() as solver:
            for encoding, hinted, effort in (("native", True, SHORT), ("skolem", True, LONG), ("native", False, SHORT)):
                answer = ask(claim, solver, encoding, hinted, effort)
                if answer.status != "unknown":
                    break
        if answer.status != "unsat":
            model = {name: value for name, value in answer.model.items() if value}
            got = f"a batch that needs more, at {model}" if answer.status == "sat" else "no proof"
            _fail(geometry, got, "a proof that no verify needs more bytes than state_buffers() declares")


def _sizes(subject: BackendUnderTest, geometry: StateGeometry, context: Context) -> tuple[Sym, Any]:
    """Return the bytes that a batch needs at least, and the bytes that the plugin declares."""
    symbolic = symbolic_geometry(geometry, context)
    try:
        specs = subject.backend.implementation("state_buffers")(geometry=symbolic)
    except SymbolicUse:
        raise
    except Exception as error:
        raise SymbolicUse(f"state_buffers() raised {type(error).__name__} on symbols: {error}") from error
    requests: Any = context.variable("R", 1)
    rows: Any = context.variable("q", 1)
    context.assume(requests <= max_requests(symbolic))
    context.assume(rows <= symbolic.draft.num_draft_tokens)
    needed = symbolic.num_layers * requests * rows * least_bytes(symbolic)
    declared: Any = 0
    for spec in with_roles(specs, {}, subject.notes.roles, state=True):
        if spec.role in KEPT:
            size: Any = BYTES[spec.dtype]
            for extent in spec.shape:
                size = size * extent
            declared = declared + size
    return needed, declared


def _term(value: Any) -> Any:
    return value.term if isinstance(value, Sym) else z3.IntVal(value)


def _fail(geometry: StateGeometry, got: str, expected: str) -> None:
    raise ContractViolation(
        "the size of the buffers that keep uncommitted rows is not proved",
        batch=brief(geometry),
        got=got,
        expected=expected,
        formula="layers · requests · rows · (value + key + channels) against the plugin's state_buffers()",
        remedy="take the extent from StateGeometry, and combine with ceil_div, maximum and minimum",
    )
