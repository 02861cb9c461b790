"""Tests of symbolic integers: they compute like integers, fork at comparisons, and reject unprovable operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import z3

from draftmark.geometry import ceil_div, maximum, minimum
from draftmark_proof.explore import explore
from draftmark_proof.problem import definitions, hints
from draftmark_proof.symbols import Context, Sym, SymbolicUse


def _value(term: Any, context: Context, **inputs: int) -> set[int]:
    """Return the only value that a term can have with these inputs, in each encoding of division."""
    found = set()
    for encoding in ("native", "skolem"):
        solver = z3.Solver()
        solver.add(*context.facts, *definitions(context, encoding), *hints(context))
        solver.add(*(context.inputs[name] == value for name, value in inputs.items()))
        assert solver.check() == z3.sat
        found.add(solver.model().eval(term.term, model_completion=True).as_long())
        solver.add(term.term != found.copy().pop())
        assert solver.check() == z3.unsat
    return found


@pytest.mark.parametrize(
    "formula",
    [
        lambda a, b: a + b * 3 - 2,
        lambda a, b: ceil_div(a, b),
        lambda a, b: -(-a // b),
        lambda a, b: a % b + divmod(a, 4)[1],
        lambda a, b: maximum(a, b, 5) - minimum(a, b),
        lambda a, b: (a + 31) >> 5 << 2,
        lambda a, b: (a + 127) & ~127,
        lambda a, b: (a * b) & 63,
        lambda a, b: abs(b - a) ** 2,
        lambda a, b: 100 // b - 7 % a,
    ],
    ids=range(10),
)
@pytest.mark.parametrize(("a", "b"), [(1, 1), (7, 3), (64, 64), (129, 2)])
def test_arithmetic_equals_python(formula: Callable[[Any, Any], Any], a: int, b: int) -> None:
    """A symbolic operation has the value of Python's operation, in both encodings of division."""
    context = Context()
    term = formula(context.variable("a", 1), context.variable("b", 1))
    assert _value(term, context, a=a, b=b) == {formula(a, b)}


@pytest.mark.parametrize(
    ("use", "helper"),
    [
        (lambda x: x / 2, "ceil_div"),
        (lambda x: math.ceil(x), "ceil_div"),
        (lambda x: int(x), "integers already"),
        (lambda x: range(x), "shape"),
        (lambda x: x.bit_length(), "bit_length"),
        (lambda x: x * 1.5, "integers only"),
        (lambda x: bool(x == 1), "maximum, minimum or ceil_div"),
    ],
    ids=["div", "ceil", "int", "range", "bits", "float", "bool"],
)
def test_rejected_operation_names_the_remedy(use: Callable[[Any], Any], helper: str) -> None:
    """An operation that cannot be proved raises an error that names a replacement."""
    with pytest.raises(SymbolicUse, match=helper):
        use(Context().variable("x", 1))


def test_plain_branches_are_explored() -> None:
    """`if`, `max` and `in` on symbols give one path per outcome; a repeated condition does not fork again."""

    def run(context: Context) -> Any:
        page, rows = context.variable("page", 1), context.variable("rows", 1)
        if page in (16, 32):
            return max(page, 16) if page == 16 else rows
        return max(rows, page)

    paths = explore(run)
    assert len(paths) == 4
    assert all(isinstance(path.result, (Sym, int)) for path in paths)


def test_impossible_branches_are_pruned() -> None:
    """A branch that contradicts earlier conditions is not explored."""

    def run(context: Context) -> str:
        x = context.variable("x", 1)
        if x == 0:
            return "never"
        if x < 3:
            return "never" if x > 5 else "small"
        return "large"

    assert sorted(path.result for path in explore(run)) == ["large", "small"]


def test_endless_branching_is_rejected() -> None:
    """A loop up to a symbolic bound would branch without end, so it raises an error with a remedy."""

    def run(context: Context) -> int:
        x, n = context.variable("x", 1), 0
        while n < x:
            n += 1
        return n

    with pytest.raises(SymbolicUse, match=r"geometry values; use draftmark\.maximum"):
        explore(run)
