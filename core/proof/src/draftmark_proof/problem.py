"""Builds the z3 problem of one claim: the definitions that it needs, and lemmas that z3 does not find by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import permutations
from typing import Any

import z3

from .symbols import Context


def relevant(context: Context, terms: Iterable[Any]) -> Context:
    """Return `context` without the divisions, maxima and products on which neither `terms` nor the facts depend."""
    seen: set[int] = set()
    for term in (*terms, *context.facts):
        _collect(term, seen)
    kept = Context()
    kept.inputs, kept.facts = context.inputs, context.facts
    # Visit the newest definition first, because a definition refers only to older variables.
    for q, terms_of, part in sorted(_definitions(context), key=lambda row: -_number(row[0])):
        if q.get_id() in seen:
            for term in terms_of:
                _collect(term, seen)
            getattr(kept, part[0]).insert(0, part[1])
    unique = {}
    for a, b, product in context.products:
        if product.get_id() in seen:
            unique[frozenset((a.get_id(), b.get_id()))] = (a, b, product)
    kept.products = list(unique.values())
    return kept


def definitions(context: Context, encoding: str) -> list[Any]:
    """Return definitions of maxima, and of quotients by z3's division (``native``) or by remainders (``skolem``)."""
    extremes = [definition for _, definition in context.extremes]
    if encoding == "native":
        return [*extremes, *(q == a / b for a, b, q in context.divisions)]
    return [*extremes, *(z3.And(q * b <= a, a < q * b + b) for a, b, q in context.divisions)]


def hints(context: Context) -> list[Any]:
    """Return lemmas: quotients by the same divisor, and products of numbers >= 0, are monotone."""
    found = []
    for (a, b, q), (c, d, p) in permutations(context.divisions, 2):
        if b.eq(d):
            found.append(z3.Implies(z3.And(b >= 1, a <= c), q <= p))
    for (a, b, _), (c, d, _) in permutations(context.products, 2):
        for e, f in ((c, d), (d, c)):
            found.append(z3.Implies(z3.And(a >= 0, a <= e, b >= 0, b <= f), a * b <= c * d))
    return found


def smt2(assertions: list[Any]) -> str:
    """Return the assertions as SMT-LIB text. z3 terms are not thread-safe, so call this from one thread at a time."""
    problem = z3.Solver()
    problem.add(*assertions)
    return str(problem.to_smt2()).replace("(check-sat)", "")


def renumbered(problem: str) -> str:
    """Return the text with its variables renumbered by first appearance, so that equal problems become equal texts."""
    numbers: dict[str, str] = {}
    return re.sub(r"(?<=!)\d+", lambda found: numbers.setdefault(found[0], str(len(numbers))), problem)


def _definitions(context: Context) -> Iterable[tuple[Any, list[Any], tuple[str, Any]]]:
    for a, b, q in context.divisions:
        yield q, [a, b], ("divisions", (a, b, q))
    for m, definition in context.extremes:
        yield m, [definition], ("extremes", (m, definition))


def _number(variable: Any) -> int:
    return int(variable.decl().name().rpartition("!")[2])


def _collect(term: Any, seen: set[int]) -> None:
    pending = [term]
    while pending:
        one = pending.pop()
        if one.get_id() not in seen:
            seen.add(one.get_id())
            pending.extend(one.children())
