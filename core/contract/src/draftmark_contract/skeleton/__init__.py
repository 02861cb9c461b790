"""Package that `draftmark new-backend NAME` writes: a backend in plain torch that loads and passes the contract.

A vendor replaces one method at a time with kernels and runs the contract after each. The tutorial
``docs/writing-a-backend.md`` prints these files. The templates are text with the placeholders ``@name@`` (entry point),
``@package@`` (import name), ``@distribution@``, ``@group@``, ``@version@`` and ``@minor@``.
"""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from draftmark.version import CONTRACT_MINOR, ENTRY_POINT_GROUP, __version__

from ..entries import entry

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PLACES = {"package": "draftmark_@name@", "github": ".github/workflows"}


def write_skeleton(name: str, folder: Path) -> Path:
    """Write the package of backend `name` and return its root, ``folder/draftmark-NAME``.

    Raises:
        ValueError: `name` is not a lower-case identifier, a backend of that name is installed, or the root exists.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"backend name is {name!r}, but it must be like my_npu: lower-case letters, digits and _")
    if taken := entry(name):
        raise ValueError(f"backend {name} is already installed by {taken.distribution}; choose another name")
    distribution = f"draftmark-{name.replace('_', '-')}"
    root = folder / distribution
    if root.exists():
        raise ValueError(f"{root} already exists; remove it, or choose another name")
    words = {
        "name": name,
        "package": f"draftmark_{name}",
        "distribution": distribution,
        "group": ENTRY_POINT_GROUP,
        "version": __version__,
        "minor": str(CONTRACT_MINOR),
    }
    _copy(files(__package__) / "template", root, words)
    return root


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> None:
    target.mkdir(parents=True)
    for each in sorted(source.iterdir(), key=lambda one: one.name):
        if each.is_dir():
            _copy(each, target / _fill(_PLACES.get(each.name, each.name), words), words)
        elif each.name.endswith(".in"):
            text = _fill(each.read_text(encoding="utf-8"), words)
            (target / each.name.removesuffix(".in")).write_text(text, encoding="utf-8")


def _fill(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text
