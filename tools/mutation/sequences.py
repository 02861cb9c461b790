"""Mutation operators on parts of sequences: slices, elements and the iterations of loops."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .nodes import with_fields, without
from .sites import Site


def bound(site: Site) -> Iterator[ast.AST]:
    """A slice without one of its bounds, or with one bound moved by one"""
    if not isinstance(site.node, ast.Slice):
        return
    for field in ("lower", "upper", "step"):
        value = getattr(site.node, field)
        if value is None:
            continue
        yield with_fields(site.node, **{field: None})
        if not isinstance(value, ast.Constant):  # the mutation operator `constant` changes bounds that are constants
            for op in (ast.Add(), ast.Sub()):
                yield with_fields(site.node, **{field: ast.BinOp(value, op, ast.Constant(1))})


def element(site: Site) -> Iterator[ast.AST]:
    """A list, tuple or dictionary without one of its elements"""
    match site.node:
        case ast.Dict(keys, values):
            for index in range(len(keys)):
                yield with_fields(site.node, keys=without(keys, index), values=without(values, index))
        case (
            ast.Tuple(elts=elements, ctx=ast.Load()) | ast.List(elts=elements, ctx=ast.Load()) | ast.Set(elts=elements)
        ):
            if not isinstance(site.parent, ast.Subscript):
                for index in range(len(elements)):
                    yield with_fields(site.node, elts=without(elements, index))


def iterate(site: Site) -> Iterator[ast.AST]:
    """A loop without its first iteration, without its last, or without any"""
    if isinstance(site.node, ast.For | ast.comprehension):
        every = ast.Tuple([ast.Starred(site.node.iter, ast.Load())], ast.Load())
        first, last = ast.Slice(ast.Constant(1)), ast.Slice(None, ast.UnaryOp(ast.USub(), ast.Constant(1)))
        for part in (first, last):
            yield with_fields(site.node, iter=ast.Subscript(every, part, ast.Load()))
        yield with_fields(site.node, iter=ast.Tuple([], ast.Load()))
