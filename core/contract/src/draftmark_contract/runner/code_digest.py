"""Computes a digest of code without comments, docstrings and blank lines, which can change only with the behaviour.

The digest is equal under every supported Python. `ast.dump` and `ast.unparse` differ between Python versions, so this
module walks the parsed tree itself.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping

UNSEEN_NAMES = ("contract.toml", "py.typed")
"""Files that do not count. A record already contains the known failures of its run."""
UNSEEN_SUFFIXES = (".md", ".pyc")
_PARSED: dict[str, bytes] = {}
"""Digest of each parsed file, by the SHA-256 of its bytes. The files of a run's process are parsed once a command."""
SINCE_312 = "type_params"
"""Field of syntax trees that Python 3.11 lacks; it is skipped when empty."""


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the SHA-256 of the names and relevant contents of (name, content) pairs. Their order is ignored."""
    digest = hashlib.sha256()
    for name, data in sorted(files):
        if counts(name):
            digest.update(name.encode() + b"\0" + _essence(name, data) + b"\0")
    return digest.hexdigest()


def counts(name: str) -> bool:
    """Return True if this file can change a backend's behaviour. name: path with ``/``."""
    *folders, last = name.split("/")
    return "__pycache__" not in folders and last not in UNSEEN_NAMES and not last.endswith(UNSEEN_SUFFIXES)


def parsed_files() -> dict[str, str]:
    """Return the digests of the files that this process has parsed, for `remember` in another process."""
    return {key: digest.hex() for key, digest in _PARSED.items()}


def remember(parsed: Mapping[str, str]) -> None:
    """Take digests of `parsed_files`. A changed file has another key, so it is parsed again."""
    _PARSED.update((key, bytes.fromhex(digest)) for key, digest in parsed.items())


def imports_of(data: bytes) -> set[str]:
    """Return the full names that a Python file imports, at module level or in functions, except relative imports."""
    try:
        nodes = list(ast.walk(ast.parse(data)))
    except (SyntaxError, ValueError):
        return set()
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }


def _essence(name: str, data: bytes) -> bytes:
    """Return a digest of the parsed code of a Python file, or the bytes of any other file (kernel source, table)."""
    return _parsed(data) if name.endswith(".py") else data


def _parsed(data: bytes) -> bytes:
    """Return the digest of a file's parsed code, or its bytes if it does not parse."""
    key = hashlib.sha256(data).hexdigest()
    if key not in _PARSED:
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            return data
        words: list[str] = []
        _write(tree, words)
        _PARSED[key] = hashlib.sha256(" ".join(words).encode()).digest()
    return _PARSED[key]


def _write(node: object, words: list[str]) -> None:
    """Append a syntax tree to `words`: nodes and fields in order, without positions and string-only statements."""
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            # Python 3.12 adds an empty string to some nested f-strings; leave it out.
            if isinstance(node, ast.JoinedStr):
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
    """Return True for a statement that is only a string, which is the docstring of a definition or an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
