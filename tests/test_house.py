"""Tests of the wheels' structure: no module imports itself through others, and none rebinds its variables."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.house import ROOT, circles_of, distributions, imports

SOURCES = {
    "__init__.py": "from .top import run",
    "top.py": "import wheel.low\n\ndef run():\n    from . import middle",
    "middle.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .part.inner import Thing",
    "low.py": "import json",
    "part/__init__.py": "",
    "part/inner.py": "from ..top import run",
}


def test_wheels_have_no_circle_of_imports() -> None:
    """Imports inside functions, for type checking and from other wheels count too."""
    found = imports(distributions())
    assert {name.partition(".")[0] for name in found} == set(distributions().values())
    assert circles_of(found) == []


def test_no_function_of_a_wheel_rebinds_a_module_variable() -> None:
    """State of a process is an attribute of an object, so that a test can replace it: no wheel has `global`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in distributions()
        for path in (ROOT / folder / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_circle_is_found(tmp_path: Path) -> None:
    """A circle through a function's import, a type-checking import and a relative import is found as a whole."""
    for name, text in SOURCES.items():
        file = tmp_path / "src" / "wheel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = imports([str(tmp_path)])
    assert found["wheel"] == {"wheel.top"} and found["wheel.top"] == {"wheel.low", "wheel.middle"}
    assert circles_of(found) == [{"wheel.top", "wheel.middle", "wheel.part.inner"}]
