"""Small helpers on syntax trees."""

from __future__ import annotations

import ast
import copy
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)
Item = TypeVar("Item")


def with_fields(node: Node, **fields: Any) -> Node:
    """Return a copy of the node with other fields. Children are shared."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def without(items: list[Item], index: int) -> list[Item]:
    """Return a copy of the list without one item."""
    return [*items[:index], *items[index + 1 :]]


def called(node: ast.AST) -> str:
    """Return the last name of a call's function, or "" for other nodes: ``triton.cdiv(a, b)`` → ``cdiv``."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""
