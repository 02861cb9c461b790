"""Lists all mutants of one source file, and applies each to the syntax tree."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .nodes import with_fields
from .operators import OPERATORS
from .sites import Site, Step, sites

AROUND = 32
"""Number of characters shown on each side of a change in a long statement."""


@dataclass(frozen=True)
class Mutation:
    """One change of one source file.

    Attributes:
        id: ``"backend.ReferenceBackend.plan/extremum-3fa1c2"``: module, scope, operator, and a digest of the statement
            before and after. The id is stable while the statement's text is, even if the statement moves.
        module: path of the file, relative to the package, without its ending; ``"__init__"`` for the package itself.
        operator: name in `OPERATORS`.
        line: line of the statement in the current source.
        statement: see `Site.statement`.
        before, after: the part of the statement that changes.
        path: steps from the module to the changed node.
        replacement: the node to put there.
    """

    id: str
    module: str
    operator: str
    line: int
    statement: int | None
    before: str
    after: str
    path: tuple[Step, ...] = field(repr=False)
    replacement: ast.AST = field(repr=False, compare=False)

    def apply(self, tree: ast.Module) -> ast.Module:
        """Return a changed copy of the tree that this mutation was made from. Unchanged nodes are shared."""
        return _replaced(tree, self.path, self.replacement)


def mutations(module: str, source: str) -> list[Mutation]:
    """Return every change of one source file, in document order. Changes with the same text count once."""
    tree = ast.parse(source)
    found: list[Mutation] = []
    times: Counter[tuple[str, ...]] = Counter()
    seen = set[tuple[int, str]]()
    for site in sites(tree):
        top = _at(tree, site.path[: site.top])
        was = _header(top)
        for operator, replacement in _changes(site):
            now = _header(_replaced(top, site.path[site.top :], replacement))
            # The same expression may occur in two statements, so `seen` includes the statement's identity.
            if now == was or (id(top), now) in seen:
                continue
            seen.add((id(top), now))
            times[key := (site.scope, was, now)] += 1
            name = _name(module, site.scope, operator, key, times[key])
            before, after = _shown(was, now)
            line = getattr(site.node, "lineno", getattr(top, "lineno", 0))
            found.append(Mutation(name, module, operator, line, site.statement, before, after, site.path, replacement))
    return found


def _changes(site: Site) -> Iterator[tuple[str, ast.AST]]:
    for name, operator in OPERATORS.items():
        for replacement in operator(site):
            yield name, replacement


def _name(module: str, scope: str, operator: str, key: tuple[str, ...], time: int) -> str:
    digest = hashlib.sha256("\0".join((operator, *key, str(time))).encode()).hexdigest()[:6]
    return f"{module}{'.' if scope else ''}{scope}/{operator}-{digest}"


def _at(tree: ast.AST, path: tuple[Step, ...]) -> ast.AST:
    for name, index in path:
        value = getattr(tree, name)
        tree = value if index is None else value[index]
    return tree


def _replaced(tree: Any, path: tuple[Step, ...], replacement: ast.AST) -> Any:
    """Return the tree with another node at the end of the path. Nodes outside the path are shared."""
    if not path:
        return ast.fix_missing_locations(copy.deepcopy(replacement))
    (name, index), rest = path[0], path[1:]
    value = getattr(tree, name)
    if index is None:
        return with_fields(tree, **{name: _replaced(value, rest, replacement)})
    return with_fields(
        tree, **{name: [*value[:index], _replaced(value[index], rest, replacement), *value[index + 1 :]]}
    )


def _header(statement: ast.AST) -> str:
    """Return the statement's text on one line, without the bodies of a compound statement."""
    if hasattr(statement, "body"):
        statement = copy.copy(statement)
        statement.body = [ast.Pass()]
        for name in ("orelse", "finalbody", "decorator_list"):
            if hasattr(statement, name):
                setattr(statement, name, [])
    return ast.unparse(statement)


def _shown(before: str, after: str) -> tuple[str, str]:
    """Return a statement before and after its change, shortened to the text around the change."""
    same = next(
        (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    rest = min(len(before), len(after)) - same
    tail = next((n for n in range(rest) if before[-1 - n] != after[-1 - n]), rest)
    first = max(0, same - AROUND)

    def cut(text: str) -> str:
        last = min(len(text), len(text) - tail + AROUND)
        return f"{'…' if first else ''}{text[first:last]}{'…' if last < len(text) else ''}".replace("\n", " ")

    return cut(before), cut(after)
