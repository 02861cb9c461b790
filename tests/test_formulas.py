"""Tests that length formulas exist only twice: in `Geometry`, and in the contract's oracle, which checks `Geometry`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCTION = tuple(
    f"core/draftmark/src/draftmark/geometry/{name}.py" for name in ("batch_geometry", "geometry", "state")
)
ORACLE = "core/contract/src/draftmark_contract/oracle/formulas.py"
FOLDERS = ("core/*/src", "plugins/*/src", "plugins/*/benchmarks", "benchmarks", "heads")


def words(node: ast.AST) -> set[str]:
    """Return the names of variables and attributes in an expression."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def is_sum(node: ast.AST, *names: str) -> bool:
    """Return True if an expression is an addition that contains all `names`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and words(node) >= set(names)


def is_product(node: ast.AST, *names: str) -> bool:
    """Return True if an expression is a multiplication that contains all `names`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and words(node) >= set(names)


def is_quotient(node: ast.AST, *names: str) -> bool:
    """Return True if an expression is a rounded division that contains all `names`."""
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
    called = isinstance(node, ast.Call) and words(node.func) & {"ceil_div"}
    return bool(divides or called) and words(node) >= set(names)


def is_maximum(node: ast.AST, *names: str) -> bool:
    """Return True if an expression is a call of `max` or `maximum` that contains all `names`."""
    called = isinstance(node, ast.Call) and words(node.func) & {"max", "maximum"}
    return bool(called) and words(node) >= set(names)


FORMULAS: dict[str, Callable[[ast.AST], bool]] = {
    "max_tail = max(1, D, k·(S-1))": lambda node: is_product(node, "topk", "num_steps"),
    "max_draft_tail = k·(S-1)": lambda node: is_product(node, "topk", "num_draft_steps"),
    "max_prefix_len = C + overlap·max_tail": lambda node: is_sum(node, "max_context_len", "max_tail"),
    "max_kv_len = max_prefix_len + max_tail": lambda node: is_sum(node, "max_prefix_len", "max_tail"),
    "max_pages_per_req = ceil(max_kv_len / P)": lambda node: is_quotient(node, "max_kv_len", "page_size"),
    "null_pages = max_reqs · ceil(max_tail / P)": lambda node: is_quotient(node, "max_tail", "page_size"),
    "max_reqs = max(max_num_reqs, captured)": lambda node: is_maximum(node, "max_num_reqs", "capture_batch_sizes"),
    "extent of DRAFT: k rows, k·(i+1) slots": lambda node: is_product(node, "topk", "step"),
    "state_numel = heads · value_dim · key_dim": lambda node: is_product(node, "num_heads", "value_dim", "key_dim"),
    "conv_numel = channels · window": lambda node: is_product(node, "conv_channels", "window"),
}


def files() -> Iterator[Path]:
    """Yield every source file except tests."""
    for folder in FOLDERS:
        for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
            if "tests" not in path.parts:
                yield path


def copies(tree: ast.AST) -> set[str]:
    """Return the formulas that a module contains a copy of."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.BinOp, ast.Call))]
    return {text for text, holds in FORMULAS.items() if any(holds(node) for node in nodes)}


def test_no_other_file_contains_a_formula() -> None:
    """No other file contains a length formula: it uses `Geometry`'s property, or in the contract the oracle's copy."""
    found = {path.relative_to(ROOT).as_posix(): copies(ast.parse(path.read_text())) for path in files()}
    others = {name: texts for name, texts in found.items() if texts and name not in (*PRODUCTION, ORACLE)}
    assert not others, f"use Geometry's property, or in the contract the oracle's function: {others}"


@pytest.mark.parametrize("text", FORMULAS)
def test_search_finds_each_formula(text: str) -> None:
    """The search finds each length formula in an expression, and does not report a use of `Geometry`'s property."""
    assert copies(ast.parse(EXAMPLES[text])) == {text}
    assert not copies(ast.parse(f"geometry.{text.split()[0]} + 1"))


EXAMPLES = {
    "max_tail = max(1, D, k·(S-1))": "max(1, d.num_draft_tokens, d.topk * (d.num_steps - 1))",
    "max_draft_tail = k·(S-1)": "g.draft.topk * g.num_draft_steps",
    "max_prefix_len = C + overlap·max_tail": "limits.max_context_len + 2 * max_tail",
    "max_kv_len = max_prefix_len + max_tail": "g.max_prefix_len + g.max_tail",
    "max_pages_per_req = ceil(max_kv_len / P)": "(g.max_kv_len + p - 1) // a.page_size",
    "null_pages = max_reqs · ceil(max_tail / P)": "reqs * ceil_div(g.max_tail, a.page_size)",
    "max_reqs = max(max_num_reqs, captured)": "max(m.max_num_reqs, *m.capture_batch_sizes)",
    "extent of DRAFT: k rows, k·(i+1) slots": "draft.topk * (step + 1)",
    "state_numel = heads · value_dim · key_dim": "s.num_heads * s.value_dim * s.key_dim",
    "conv_numel = channels · window": "s.conv_channels * g.window",
}
