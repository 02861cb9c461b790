"""Mutation operators on whole statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .sites import Site


def drop(site: Site) -> Iterator[ast.AST]:
    """A statement left out: call, raise, assignment to an existing name, early return; `break` for `continue`"""
    match site.node:
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Return(value=None):
            yield ast.Pass()
        case ast.Assign(targets=targets) if all(_exists(target, site) for target in targets):
            yield ast.Pass()
        case ast.Return(value=value) if _early(site) and value is not None:
            yield ast.Pass()
        case ast.Continue():
            yield from (ast.Pass(), ast.Break())
        case ast.Break():
            yield from (ast.Pass(), ast.Continue())


def _exists(target: ast.expr, site: Site) -> bool:
    """Return True if the target exists without the statement: an element, an attribute or a name bound before."""
    match target:
        case ast.Subscript() | ast.Attribute():
            return True
        case ast.Name(id=name):
            function = next((one for one in reversed(site.parents) if isinstance(one, ast.FunctionDef)), None)
            return function is not None and _bound_before(name, function, site.node)
    return False


def _bound_before(name: str, function: ast.FunctionDef, statement: ast.AST) -> bool:
    if name in {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}:
        return True
    stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    line = getattr(statement, "lineno", 0)
    return any(node.id == name and node.lineno < line for node in stored)


def _early(site: Site) -> bool:
    """Return True for a `return` inside a block: only then can other statements of the function run after it."""
    return not isinstance(site.parent, ast.FunctionDef)
