"""Tests of the mutation operators."""

from __future__ import annotations

import ast

import pytest

from draftmark_contract.check import spread
from tools.mutation.mutation import Mutation, mutations
from tools.mutation.operators import OPERATORS, described
from tools.mutation.targets import TARGETS

CASES = [
    ("arithmetic", "return a + b", {"return a - b"}),
    ("arithmetic", "return a * b", {"return a + b", "return a // b"}),
    ("arithmetic", "a |= b", {"a &= b"}),
    ("operand", "return a + b", {"return a", "return b"}),
    ("operand", "return a and b", {"return a", "return b"}),
    ("operand", "a += b", {"a = b"}),
    ("rounding", "return ceil_div(a, b)", {"return a // b"}),
    ("rounding", "return a // b", {"return -(-a // b)"}),
    ("extremum", "return min(a, b)", {"return max(a, b)", "return a", "return b"}),
    ("extremum", "return torch.maximum(*a)", {"return torch.minimum(*a)"}),
    ("sign", "return -a", {"return a"}),
    ("sign", "return ~a", {"return a"}),
    ("constant", "return 3", {"return 4", "return 2"}),
    ("constant", "return 0.5", {"return 1.5", "return -0.5"}),
    ("constant", "return True", {"return False"}),
    ("word", "return 'int32'", {"return 'int64'"}),
    ("word", "return 'kv_lens'", {"return 'kv_lens_'"}),
    ("word", "return 'a sentence'", set()),
    ("compare", "return a < b", {"return a <= b", "return a >= b"}),
    ("compare", "return a is None", {"return a is not None"}),
    (
        "compare",
        "return 0 < a < b",
        {"return 0 <= a < b", "return 0 >= a < b", "return 0 < a <= b", "return 0 < a >= b"},
    ),
    ("boolean", "return a or b", {"return a and b"}),
    ("boolean", "return not a", {"return a"}),
    ("condition", "if a: b()", {"if True: pass", "if False: pass", "if not a: pass"}),
    ("condition", "if a < b: b()", {"if True: pass", "if False: pass"}),
    ("condition", "return a if b else c", {"return a", "return c"}),
    ("condition", "return [a for a in b if a]", {"return [a for a in b]"}),
    ("argument", "return a(b, c=1, d=2)", {"return a(b, d=2)", "return a(b, c=1)"}),
    ("swap", "return a(b, c, d)", {"return a(c, b, d)", "return a(b, d, c)"}),
    ("unwrap", "return a.long()", {"return a"}),
    ("unwrap", "return torch.tanh(a)", {"return a"}),
    ("unwrap", "return torch.where(a, b, c)", set()),
    ("sibling", "return a.num_kv_heads", {"return a.num_qo_heads"}),
    ("sibling", "return k, v", {"return v, v", "return k, k"}),
    ("sibling", "return q_len", set()),
    ("slice", "return a[:b]", {"return a[:]", "return a[:b + 1]", "return a[:b - 1]"}),
    ("slice", "return a[1:]", {"return a[:]"}),
    ("element", "return [a, b]", {"return [b]", "return [a]"}),
    ("element", "return {'a': b, 'b': b}", {"return {'b': b}", "return {'a': b}"}),
    ("element", "return a[b, c]", set()),
    ("iterate", "for x in a: b()", {"for x in (*a,)[1:]: pass", "for x in (*a,)[:-1]: pass", "for x in (): pass"}),
    ("drop", "a.append(b)", {"pass"}),
    ("drop", "a[0] = b", {"pass"}),
    ("drop", "x = b", set()),
    ("drop", "a = b", {"pass"}),
    ("drop", "raise a", {"pass"}),
]
"""(operator, only statement of a function of a, b, c, k, v; the statements that the operator makes of it)."""


@pytest.mark.parametrize(("operator", "statement", "expected"), CASES)
def test_operator_makes_the_expected_statements(operator: str, statement: str, expected: set[str]) -> None:
    """A mutation operator turns the statement into exactly the expected statements."""
    source = f"import torch\ndef f(a, b, c, k, v):\n    {statement}\n"
    made = [one for one in mutations("m", source) if one.operator == operator]
    assert {_statement(source, one) for one in made} == {_plain(one) for one in expected}


def test_every_operator_is_tested_and_described() -> None:
    """Every mutation operator has a test case in this file and a line on the page."""
    assert {operator for operator, _, expected in CASES if expected} == set(OPERATORS)
    assert all(described().values())


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_every_mutant_compiles_and_is_unique(name: str) -> None:
    """Mutants of the real targets compile, differ from the source, and have unique ids."""
    target = TARGETS[name]
    found = target.mutations()
    assert len({one.id for one in found}) == len(found)
    trees = {module: ast.parse(target.source(module)) for module in target.modules}
    for one in spread(found, 80):
        changed = ast.unparse(one.apply(trees[one.module]))
        compile(changed, one.module, "exec")
        assert changed != ast.unparse(trees[one.module]), one.id


def _statement(source: str, mutation: Mutation) -> str:
    function = mutation.apply(ast.parse(source)).body[1]
    assert isinstance(function, ast.FunctionDef)
    return _headed(function.body[0])


def _plain(statement: str) -> str:
    return _headed(ast.parse(f"def f():\n    {statement}").body[0].body[0])  # type: ignore[attr-defined]


def _headed(statement: ast.stmt) -> str:
    if hasattr(statement, "body"):
        statement.body = [ast.Pass()]
    return ast.unparse(statement)
