"""Mutation operators on calls and names: another argument, receiver or name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .nodes import called, with_fields, without
from .sites import TEXTS, Site

SIBLINGS = (
    ("num_qo_heads", "num_kv_heads"),
    ("q_lens", "tail_lens"),
    ("q_len", "tail_len"),
    ("num_reqs", "padded_reqs"),
    ("k", "v"),
    ("k_scale", "v_scale"),
    ("k_cache", "v_cache"),
    ("q_dtype", "kv_dtype"),
    ("max_kv_len", "max_prefix_len"),
    ("max_reqs", "max_num_reqs"),
    ("max_rows_any", "max_reqs"),
    ("page_size", "head_dim"),
    ("block_m", "block_n"),
    ("block_d", "head_dim"),
    ("int32", "int64"),
    ("float32", "float16"),
    ("float", "half"),
    ("float", "double"),
    ("reshape", "view"),
    ("mask", "depth"),
    ("prefix", "tail"),
    ("rows", "request"),
    ("begin", "end"),
    ("bits", "depth"),
    ("num_rows", "num_reqs"),
    ("partial_out", "partial_lse"),
    ("PARTIAL_OUT", "PARTIAL_LSE"),
    ("drafts", "parents"),
    ("tokens", "path"),
    ("accept_index", "accept_lens"),
    ("q", "out"),
    ("PREFIX_PLUS_TAIL", "PREFIX"),
    ("EXTEND", "VERIFY"),
)
"""Pairs of names that are easily confused in attention code."""


def argument(site: Site) -> Iterator[ast.AST]:
    """A call without one of its keyword arguments"""
    if isinstance(site.node, ast.Call):
        for index, keyword in enumerate(site.node.keywords):
            if keyword.arg is not None and keyword.arg not in TEXTS.get(called(site.node), ()):
                yield with_fields(site.node, keywords=without(site.node.keywords, index))


def swap(site: Site) -> Iterator[ast.AST]:
    """Two neighbouring arguments of a call exchanged"""
    if not isinstance(site.node, ast.Call) or any(isinstance(one, ast.Starred) for one in site.node.args):
        return
    given = site.node.args
    for index in range(len(given) - 1):
        yield with_fields(site.node, args=[*given[:index], given[index + 1], given[index], *given[index + 2 :]])


def unwrap(site: Site) -> Iterator[ast.AST]:
    """The object of a method call, or the only argument of a function, instead of the result"""
    match site.node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in site.modules:
            pass
        case ast.Call(func=ast.Attribute(value=value)):
            yield value
            return
    match site.node:
        case ast.Call(args=[value], keywords=[]) if not isinstance(value, ast.Starred | ast.GeneratorExp):
            yield value


def sibling(site: Site) -> Iterator[ast.AST]:
    """Another name that is easily confused with this one"""
    match site.node:
        case ast.Attribute(attr=name, ctx=ast.Load()):
            for other in _siblings(name):
                yield with_fields(site.node, attr=other)
        case ast.Name(id=name, ctx=ast.Load()):
            for other in _siblings(name):
                if other in site.names:
                    yield with_fields(site.node, id=other)


def _siblings(name: str) -> list[str]:
    return [b if name == a else a for a, b in SIBLINGS if name in (a, b)]
