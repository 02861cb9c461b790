"""Runs a function on symbols along every branch that its `if`, `max` and `in` can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import z3

from .symbols import Context, SymbolicUse

MAX_PATHS = 64
_RLIMIT = 200_000
"""z3's own count of work per query, so that pruning does not depend on the machine's speed."""
_TOO_MANY = (
    f"sizing code has more than {MAX_PATHS} branches on geometry values; "
    "use draftmark.maximum, minimum and ceil_div instead of if, max and min"
)


@dataclass
class Path:
    """One path through the function: its symbols, the conditions that were taken, and the function's result."""

    context: Context
    conditions: list[Any]
    result: Any


def explore(run: Callable[[Context], Any]) -> list[Path]:
    """Call `run` once per path, each time with a new context.

    Raises:
        SymbolicUse: there are more than `MAX_PATHS` paths, or an operation cannot be proved.
    """
    paths: list[Path] = []
    pending: list[list[bool]] = [[]]
    while pending:
        choices = pending.pop()
        context, conditions = Context(), list[Any]()
        taken: list[bool] = []

        def decide(
            term: Any,
            context: Context = context,
            conditions: list[Any] = conditions,
            taken: list[bool] = taken,
            choices: list[bool] = choices,
        ) -> bool:
            if z3.is_true(term) or z3.is_false(term):
                return bool(z3.is_true(term))
            if (known := _known(conditions, term)) is not None:
                return known
            if len(taken) < len(choices):
                choice = choices[len(taken)]
            else:
                possible = [side for side in (True, False) if _possible(context, conditions, term, side)]
                choice = possible[0] if possible else True
                if len(possible) == 2:
                    pending.append([*taken, not choice])
                    if len(paths) + len(pending) > MAX_PATHS:
                        raise SymbolicUse(_TOO_MANY)
            taken.append(choice)
            conditions.append(term if choice else z3.Not(term))
            return choice

        context.decide = decide
        result = run(context)
        context.decide = None
        paths.append(Path(context, conditions, result))
    return paths


def _known(conditions: list[Any], term: Any) -> bool | None:
    """Return the side that this path has already taken for the same condition, or None for a new condition."""
    sides = [side for side in (True, False) for one in conditions if one.eq(term if side else z3.Not(term))]
    return sides[0] if sides else None


def _possible(context: Context, conditions: list[Any], term: Any, side: bool) -> bool:
    """Return False only if this side contradicts facts, maxima and conditions of the path. Divisions are ignored."""
    solver = z3.Solver()
    solver.set("rlimit", _RLIMIT)
    known = [*context.facts, *(definition for _, definition in context.extremes), *conditions]
    solver.add(*known, term if side else z3.Not(term))
    return bool(solver.check() != z3.unsat)
