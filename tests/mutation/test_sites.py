"""Tests of the syntax nodes that are never mutated, and of mutant ids."""

from __future__ import annotations

import pytest

from tools.mutation.mutation import mutations

LEFT_OUT = {
    "docstrings": 'def f():\n    """The text of 1 + 1."""\n',
    "annotations": 'def f(a: "int32") -> tuple[int, "int64"]:\n    """None."""\n',
    "imports": "import a\nfrom b import c\n",
    "code for the type checker": "if TYPE_CHECKING:\n    from a import b\n",
    "assertions for the type checker": "def f(a):\n    assert a > 1, 'too small'\n",
    "names for export": "__all__ = ['a', 'b']\n",
    "texts for people": "class A:\n    def __repr__(self):\n        return str(1 + 1)\n",
    "the text of a buffer's formula": "a = BufferSpec(b, c, d, e, f, 'max_reqs')\nb = BufferSpec(formula='max_rows')\n",
    "device arguments": "def f(k, v):\n    return g(device=k.device)\n",
    "decorators": "@dataclass(frozen=True)\nclass A:\n    pass\n",
}
SOURCE = """
def f(a, b):
    c = a + b
    return c - 1

def g(a):
    if a:
        return 2
    return 3
"""


@pytest.mark.parametrize("what", LEFT_OUT)
def test_left_out(what: str) -> None:
    """No mutant changes code without effect on results, e.g. texts for people or a `device` argument."""
    made = [one for one in mutations("m", LEFT_OUT[what]) if one.operator not in ("swap", "argument")]
    assert [(one.before, one.after) for one in made] == []


def test_an_error_is_only_dropped() -> None:
    """A raise statement has one mutant, which removes the statement. No mutant changes the error's text."""
    made = mutations("m", "def f(a):\n    raise ValueError(f'{a + 1} is wrong', 2)\n")
    assert [(one.operator, one.after) for one in made] == [("drop", "pass")]


def test_ids_do_not_depend_on_lines_or_neighbours() -> None:
    """Statements before, after or between other statements do not change their ids."""
    moved = "import x\n\n" + SOURCE.replace("c = a + b", "x.go()\n    c = a + b") + "\ndef h():\n    return 1\n"
    before, after = ({one.id for one in mutations("m", text)} for text in (SOURCE, moved))
    assert before < after


def test_an_id_changes_with_its_statement() -> None:
    """If a statement's text changes, the ids of its mutants change too, so an old review no longer applies."""
    before, after = (
        {one.id for one in mutations("m", text)} for text in (SOURCE, SOURCE.replace("a + b", "a + b + 0"))
    )
    gone = before - after
    assert gone and all(one.startswith("m.f/") for one in gone)


def test_equal_statements_have_different_ids() -> None:
    """Mutants of two equal statements in one function have different ids."""
    made = mutations("m", "def f(a):\n    a += 1\n    a += 1\n")
    assert len({one.id for one in made}) == len(made) == 2 * len(mutations("m", "def f(a):\n    a += 1\n"))


@pytest.mark.parametrize(
    ("source", "statements"),
    [
        ("A = 1\n", {None}),
        ("class A:\n    b: int = 1\n", {None}),
        ("def f(a=1):\n    pass\n", {None}),
        ("@cache\ndef f():\n    return 1\n", {None}),
        ("def f():\n    return 1\n", {1}),
        ("class A:\n    def f(self):\n        if a:\n            return 1\n", {2, 3}),
    ],
)
def test_a_mutant_has_the_number_of_its_statement(source: str, statements: set[int | None]) -> None:
    """Code that runs at import or in a cached function has no statement number, so every item runs on its mutants."""
    assert {one.statement for one in mutations("m", source)} == statements


def test_a_long_statement_is_shortened() -> None:
    """A mutant of a long statement shows only the text around its change."""
    made = mutations("m", f"def f(a):\n    return g({', '.join(['a'] * 60)}, a + 1, {', '.join(['a'] * 60)})\n")
    one = next(one for one in made if one.operator == "arithmetic")
    assert "a + 1" in one.before and "a - 1" in one.after and max(len(one.before), len(one.after)) < 90
