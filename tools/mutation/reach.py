"""Records the statements of a copy that run, by a call inserted before each statement of its functions."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Sequence

from .sites import numbers

NOTE = "__draftmark_reached__"


class Reach:
    """Records the statements that ran since `clear`, as (module, number); `sites.numbers` gives the numbers."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = set(modules)
        self.seen = set[tuple[str, int]]()
        setattr(builtins, NOTE, lambda module, number: self.seen.add((module, number)))

    def clear(self) -> None:
        """Forget all recorded statements."""
        self.seen.clear()

    def change(self, module: str, tree: ast.Module) -> ast.Module | None:
        """Return the tree with a recording call before each statement of its functions; for `copies.load_copy`."""
        if module not in self._modules:
            return None
        tree = copy.deepcopy(tree)
        number = numbers(tree)
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            _note(function, module, number)
        return ast.fix_missing_locations(tree)


def _note(node: ast.AST, module: str, number: dict[ast.stmt, int]) -> None:
    """Insert recording calls into every block of statements below a function."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
            continue
        noted: list[ast.stmt] = []
        for statement in block:
            call = ast.parse(f"{NOTE}({module!r}, {number[statement]})").body[0]
            noted += [call, statement]
        setattr(node, field, noted)
        for statement in block:
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                _note(statement, module, number)
    for handler in getattr(node, "handlers", []):
        _note(handler, module, number)
