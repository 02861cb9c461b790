"""Tests of changed copies of a package: the copy runs the mutant, and the original package stays unchanged."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import pytest

import draftmark
from draftmark import AttentionShape, Geometry, Limits
from tools.mutation.copies import load_copy
from tools.mutation.mutation import Mutation
from tools.mutation.reach import Reach
from tools.mutation.sites import numbers
from tools.mutation.targets import TARGETS

REFERENCE, TRITON = TARGETS["reference"], TARGETS["cuda_triton"]
GEOMETRY = Geometry.create(
    AttentionShape(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16), Limits(4, 256, 64)
)

Forked = Callable[[Callable[[], Any]], Any]


def _one(module: str, operator: str, before: str, after: str) -> Mutation:
    """Return the only mutant of the reference with this operator and change."""
    found = [
        one
        for one in REFERENCE.mutations()
        if (one.module, one.operator) == (module, operator) and before in one.before and after in one.after
    ]
    assert len(found) == 1, found
    return found[0]


def test_the_copy_runs_the_changed_module(forked: Forked) -> None:
    """A mutant that changes a buffer name changes it in the copy of the package, not in the original."""
    mutation = _one("sizing", "word", "BufferSpec('kv_lens', ", "BufferSpec('kv_lens_', ")

    def names() -> list[list[str]]:
        copy = load_copy(REFERENCE, lambda name, tree: mutation.apply(tree) if name == "sizing" else None)
        original = draftmark.load("reference")
        return [[spec.name for spec in one.buffers(GEOMETRY)] for one in (copy, original)]

    assert forked(names) == [["kv_lens_", "slot_mapping"], ["kv_lens", "slot_mapping"]]


def test_the_copy_has_its_own_modules(forked: Forked) -> None:
    """A copy imports its own modules, except those that the target declares as shared."""

    def modules() -> list[object]:
        copy = load_copy(TRITON, lambda name, tree: None)

        def is_shared(name: str) -> bool:
            copied, original = (sys.modules[f"{one}draftmark_cuda_triton.{name}"] for one in ("mutated_", ""))
            return copied is original

        return [type(copy.plugin).__module__, is_shared("kernel_variants"), is_shared("sizing")]

    draftmark.load("cuda_triton")
    assert forked(modules) == ["mutated_draftmark_cuda_triton", True, False]
    assert not [name for name in sys.modules if name.startswith("mutated_")]


def test_a_copy_that_cannot_be_loaded_raises(forked: Forked) -> None:
    """An error at import of the copy raises BackendLoadError and does not crash the run."""

    def failure() -> str:
        try:
            load_copy(REFERENCE, lambda name, tree: ast.parse("1 / 0"))
        except draftmark.BackendLoadError as error:
            return str(error)
        return "loaded"

    assert "ZeroDivisionError" in forked(failure)


SOURCE = """
def f(a):
    # The first statement.
    if a:
        b = 1
    elif a is None:
        b = 2
    else:
        for b in (1, 2):
            c = b
    def g():
        return b
    return g
"""


@pytest.mark.parametrize(
    ("given", "lines"), [(1, {4, 5, 11, 13}), (None, {4, 6, 7, 11, 13}), (0, {4, 6, 9, 10, 11, 13})]
)
def test_reach_records_the_statements_that_run(given: object, lines: set[int]) -> None:
    """Only statements that run are recorded. Branches not taken and functions not called are absent."""
    tree = ast.parse(SOURCE)
    reach = Reach(["m"])
    scope: dict[str, object] = {}
    changed = reach.change("m", tree)
    assert changed is not None and reach.change("other", tree) is None
    exec(compile(ast.unparse(changed), "m", "exec"), scope)
    scope["f"](given)  # type: ignore[operator]
    line = {number: statement.lineno for statement, number in numbers(tree).items()}
    assert {line[number] for _, number in reach.seen} == lines
