"""A digest of code that changes when its behaviour may: comments, docstrings and blank lines do not count.

The same under every Python that this project supports: the parsed tree is walked here, since `ast.dump` and
`ast.unparse` write other text from one Python to the next.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import lru_cache

UNSEEN_NAMES = ("contract.toml", "py.typed")
"""A record itself says what its run declared to be known."""
UNSEEN_SUFFIXES = (".md", ".pyc")
SINCE_312 = "type_params"
"""A field that Python 3.11 does not know; empty wherever it could matter here."""


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over names and what counts of each file; the order of the files does not matter."""
    digest = hashlib.sha256()
    for name, data in sorted(files):
        if counts(name):
            digest.update(name.encode() + b"\0" + _essence(name, data) + b"\0")
    return digest.hexdigest()


def counts(name: str) -> bool:
    """Whether a file, by its path with ``/``, can change what a backend does."""
    *folders, last = name.split("/")
    return "__pycache__" not in folders and last not in UNSEEN_NAMES and not last.endswith(UNSEEN_SUFFIXES)


def imports_of(data: bytes) -> set[str]:
    """Full names that a Python file imports, at its top or inside a function; relative ones are left out."""
    try:
        nodes = list(ast.walk(ast.parse(data)))
    except (SyntaxError, ValueError):
        return set()
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }


def _essence(name: str, data: bytes) -> bytes:
    """The parsed code of a Python file; any other file (a kernel's source, a table) counts by its bytes."""
    return _parsed(data) if name.endswith(".py") else data


@lru_cache(maxsize=1024)
def _parsed(data: bytes) -> bytes:
    """Cached, since a file is usually equal to its committed self. What is not Python counts by its bytes."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return data
    words: list[str] = []
    _write(tree, words)
    return hashlib.sha256(" ".join(words).encode()).digest()


def _write(node: object, words: list[str]) -> None:
    """The tree as words: nodes with their fields in order, without positions and without strings that nobody uses."""
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(node, ast.JoinedStr):  # 3.12 writes an empty text into some nested formats
                value = [one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")]
            if value is not None and (field != SINCE_312 or value):
                words.append(field)
                _write(value, words)
        words.append(")")
    elif isinstance(node, list):
        for one in node:
            if not _is_text(one):
                _write(one, words)
        words.append("]")
    else:
        words.append(repr(node))


def _is_text(node: object) -> bool:
    """Whether a statement is a mere string: a docstring, of an attribute too."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
