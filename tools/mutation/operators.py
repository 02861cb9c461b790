"""All mutation operators by name. Each receives a site (syntax node with its place) and yields replacements."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from . import arguments, choices, sequences, statements, values
from .sites import Site

Operator = Callable[[Site], Iterator[ast.AST]]

OPERATORS: dict[str, Operator] = {
    "arithmetic": values.arithmetic,
    "operand": values.operand,
    "rounding": values.rounding,
    "extremum": values.extremum,
    "sign": values.sign,
    "constant": values.constant,
    "word": values.word,
    "compare": choices.compare,
    "boolean": choices.boolean,
    "condition": choices.condition,
    "argument": arguments.argument,
    "swap": arguments.swap,
    "unwrap": arguments.unwrap,
    "sibling": arguments.sibling,
    "slice": sequences.bound,
    "element": sequences.element,
    "iterate": sequences.iterate,
    "drop": statements.drop,
}
"""If two operators make the same change, the earlier one gives it its name."""


def described() -> dict[str, str]:
    """Return the replacement that each operator makes, from the first line of its docstring."""
    return {name: (operator.__doc__ or "").partition("\n")[0] for name, operator in OPERATORS.items()}
