"""Mutation operators on computed values: numbers, operands and words."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .nodes import called, with_fields
from .sites import Site

OTHER_ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.FloorDiv),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitAnd,),
}
OTHER_EXTREMUM = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
ROUNDED_UP = {"ceil_div", "cdiv"}
OTHER_WORDS = {
    "int32": "int64",
    "int64": "int32",
    "float32": "float16",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "cuda": "cpu",
    "cpu": "cuda",
    "any": "cuda",
}
"""Strings that a string is likely to be confused with. Other strings get a trailing underscore."""


def arithmetic(site: Site) -> Iterator[ast.AST]:
    """Another arithmetic or bitwise operator"""
    if isinstance(site.node, ast.BinOp | ast.AugAssign):
        for other in OTHER_ARITHMETIC.get(type(site.node.op), ()):
            yield with_fields(site.node, op=other())


def operand(site: Site) -> Iterator[ast.AST]:
    """Only one operand of an arithmetic or boolean expression or of an augmented assignment"""
    match site.node:
        case ast.BinOp(left, _, right):
            yield from (left, right)
        case ast.BoolOp(values=values):
            yield from values
        case ast.AugAssign(target, _, value):
            yield ast.Assign([target], value, lineno=site.node.lineno)


def rounding(site: Site) -> Iterator[ast.AST]:
    """A quotient rounded the other way"""
    match site.node:
        case ast.Call(args=[left, right]) if called(site.node) in ROUNDED_UP:
            yield ast.BinOp(left, ast.FloorDiv(), right)
        case ast.BinOp(left, ast.FloorDiv(), right):
            up = ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right)
            yield ast.UnaryOp(ast.USub(), up)


def extremum(site: Site) -> Iterator[ast.AST]:
    """A minimum instead of a maximum or the reverse, or only one of the arguments"""
    if not isinstance(site.node, ast.Call) or called(site.node) not in OTHER_EXTREMUM:
        return
    function, other = site.node.func, OTHER_EXTREMUM[called(site.node)]
    name = "attr" if isinstance(function, ast.Attribute) else "id"
    yield with_fields(site.node, func=with_fields(function, **{name: other}))
    if len(site.node.args) > 1:
        yield from (one for one in site.node.args if not isinstance(one, ast.Starred))


def sign(site: Site) -> Iterator[ast.AST]:
    """An expression without its minus or its bitwise not"""
    match site.node:
        case ast.UnaryOp(ast.USub() | ast.Invert(), value):
            yield value


def constant(site: Site) -> Iterator[ast.AST]:
    """A number plus or minus one, or the other truth value"""
    if not isinstance(site.node, ast.Constant):
        return
    match site.node.value:
        case bool(value):
            yield ast.Constant(not value)
        case int(value) | float(value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))


def word(site: Site) -> Iterator[ast.AST]:
    """Another word, if a string is a name"""
    match site.node:
        case ast.Constant(str(text)) if text.isidentifier():
            yield ast.Constant(OTHER_WORDS.get(text, f"{text}_"))
