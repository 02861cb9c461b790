"""Finds the sites of a source: every node with a change that could change the program's results.

Left out, because no run can see a change: docstrings, annotations, imports, code for the type checker, the text and
class of errors, `__repr__`, `__all__`, decorators, texts for people (`TEXTS`), and the `device` argument of a call,
because all tensors of a run are on one device.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

Step = tuple[str, int | None]
"""Name of a node's field, and the index if the field is a list."""

TEXTS = {"BufferSpec": {5, "formula"}, "BackendInfo": {"summary", "install"}}
"""Call → positions and names of arguments that only people read."""
SILENT_FUNCTIONS = {"__repr__", "__str__"}
_VISITED = {
    ast.FunctionDef: ("args", "body"),
    ast.AsyncFunctionDef: ("args", "body"),
    ast.ClassDef: ("body",),
    ast.arguments: ("defaults", "kw_defaults"),
    ast.AnnAssign: ("value",),
    ast.Raise: (),
    ast.Assert: (),
    ast.Import: (),
    ast.ImportFrom: (),
    ast.JoinedStr: (),
}
"""Kinds of nodes with only some fields to visit. All fields of other kinds are visited."""


@dataclass(frozen=True)
class Site:
    """One syntax node and its place in the syntax tree.

    Attributes:
        node: the node itself; must not be changed in place.
        path: steps from the module to the node.
        scope: qualified name of the function or class around the node, "" at module level.
        statement: number, in document order, of the statement that evaluates the node. None at import or in a cached
            function, because no single item reaches the node there.
        top: number of steps of `path` to the innermost statement, function or class that contains or is the node.
        parents: nodes from the module down to the node's parent.
        names: names that the function around the node binds.
        modules: names that the file imports.
    """

    node: ast.AST
    path: tuple[Step, ...] = ()
    scope: str = ""
    statement: int | None = None
    top: int = 0
    parents: tuple[ast.AST, ...] = ()
    names: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    @property
    def parent(self) -> ast.AST:
        """The parent node."""
        return self.parents[-1]


def sites(tree: ast.Module) -> Iterator[Site]:
    """Yield every syntax node that mutation operators are allowed to change, in document order."""
    yield from _below(Site(tree, modules=_imported(tree)), numbers(tree))


def numbers(tree: ast.Module) -> dict[ast.stmt, int]:
    """Number all statements in document order, and return the number of each statement."""
    found = [node for node in _in_order(tree) if isinstance(node, ast.stmt)]
    return {node: number for number, node in enumerate(found)}


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _below(site: Site, number: dict[ast.stmt, int]) -> Iterator[Site]:
    for field in _VISITED.get(type(site.node), site.node._fields):
        value = getattr(site.node, field)
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _left_out(site.node, field, index, child):
                below = _enter(site, child, (field, index), number)
                yield below
                yield from _below(below, number)


def _enter(site: Site, child: ast.AST, step: Step, number: dict[ast.stmt, int]) -> Site:
    path = (*site.path, step)
    below = replace(site, node=child, path=path, parents=(*site.parents, site.node))
    if isinstance(child, ast.stmt):
        below = replace(below, top=len(path))
        function = next((one for one in reversed(below.parents) if isinstance(one, ast.FunctionDef)), None)
        if function is not None and not _keeps_results(function):
            below = replace(below, statement=number[child])
    if isinstance(child, ast.FunctionDef | ast.ClassDef):
        scope = f"{site.scope}.{child.name}" if site.scope else child.name
        below = replace(below, scope=scope, statement=None, names=site.names | _bound(child))
    return below


def _left_out(parent: ast.AST, field: str, index: int | None, child: ast.AST) -> bool:
    match parent, child:
        case _, ast.Import() | ast.ImportFrom() | ast.Assert():
            return True
        case _, ast.Expr(value=ast.Constant()):
            return True
        case _, ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case _, ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case _, ast.FunctionDef(name=name) if name in SILENT_FUNCTIONS:
            return True
        case ast.keyword(arg="device"), _:
            return True
        case ast.Call(func=ast.Name(id=name)), _ if name in TEXTS:
            key = child.arg if isinstance(child, ast.keyword) else index
            return field in ("args", "keywords") and key in TEXTS[name]
    return isinstance(child, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop)


def _keeps_results(function: ast.FunctionDef) -> bool:
    return any("cache" in ast.unparse(decorator) for decorator in function.decorator_list)


def _imported(tree: ast.Module) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return frozenset(found)


def _bound(scope: ast.FunctionDef | ast.ClassDef) -> frozenset[str]:
    """Return the names that a function binds. A class returns none, because its methods do not see its names."""
    if isinstance(scope, ast.ClassDef):
        return frozenset()
    stored = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(stored | {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)})
