"""Mutation operators on decisions: comparisons, boolean expressions and conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .nodes import with_fields
from .sites import Site

OTHER_COMPARISON: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""Comparisons to try instead of one: with the boundary moved, and the opposite."""


def compare(site: Site) -> Iterator[ast.AST]:
    """A comparison with its boundary moved, or the opposite comparison"""
    if isinstance(site.node, ast.Compare):
        for index, one in enumerate(site.node.ops):
            for other in OTHER_COMPARISON[type(one)]:
                yield with_fields(site.node, ops=[*site.node.ops[:index], other(), *site.node.ops[index + 1 :]])


def boolean(site: Site) -> Iterator[ast.AST]:
    """`or` for `and`, `and` for `or`, or an expression without its `not`"""
    match site.node:
        case ast.BoolOp(ast.And()):
            yield with_fields(site.node, op=ast.Or())
        case ast.BoolOp(ast.Or()):
            yield with_fields(site.node, op=ast.And())
        case ast.UnaryOp(ast.Not(), value):
            yield value


def condition(site: Site) -> Iterator[ast.AST]:
    """A condition that is always true, always false or negated; one of the two values of a conditional expression"""
    match site.node:
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.If(test=test):
            for other in (ast.Constant(True), ast.Constant(False), *_opposite(test)):
                yield with_fields(site.node, test=other)
        case ast.While(test=test):
            for other in (ast.Constant(False), *_opposite(test)):
                yield with_fields(site.node, test=other)
        case ast.comprehension(ifs=[_, *_]):
            yield with_fields(site.node, ifs=[])


def _opposite(test: ast.expr) -> list[ast.expr]:
    """Return the negated test, or nothing for tests that `compare` and `boolean` change already."""
    if isinstance(test, ast.Compare | ast.UnaryOp):
        return []
    return [ast.UnaryOp(ast.Not(), test)]
