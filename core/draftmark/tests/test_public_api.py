"""The public API is recorded in a text file, so that every change of the API changes that file."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from public_api import FILE, MODULES, api_text

ROOT = Path(__file__).parents[3]
ALLOWED = {"draftmark", "draftmark.runtime"}
SIBLINGS = {"draftmark_cuda_triton.shared", "draftmark_cuda_triton.shared_sizing"}
"""Modules that plugins may import from one another; their names are stable."""
RECORDER = {"draftmark.graphs.active"}
"""State of this thread that a recorder of graphs sets."""


def test_the_api_equals_the_recorded_text() -> None:
    """The public API equals public_api.txt, so a new, changed or removed name fails this test."""
    command = "python core/draftmark/tests/public_api.py"
    assert api_text() == FILE.read_text(), f"the public API changed: run `{command}`, and add it to CHANGELOG.md"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    """`__all__` has no duplicates, its names resolve, and each class and function has a docstring."""
    module = importlib.import_module(name)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, type) or callable(value):
            assert (value.__doc__ or "").strip(), f"{name}.{public} has no docstring"


def test_public_modules_share_no_name() -> None:
    """Each public name is in one module only."""
    names = [one for name in MODULES for one in importlib.import_module(name).__all__]
    assert sorted(names) == sorted(set(names))


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports with absolute imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("folder", sorted(ROOT.glob("plugins/*/src/*/")), ids=lambda folder: folder.name)
def test_plugins_use_the_public_api_only(folder: Path) -> None:
    """A plugin imports the public modules and modules shared by plugins; only contract.py imports the test suite."""
    for path in folder.rglob("*.py"):
        own = {name for name in imports(path) if name.split(".")[0].startswith("draftmark")}
        suite = {name for name in own if name.startswith("draftmark_contract")}
        strange = own - ALLOWED - SIBLINGS - suite - {folder.name}
        strange -= RECORDER if folder.name == "draftmark_reference" and path.parent.name == "graphs" else set()
        assert not strange, f"{path.name} imports {strange}: import the name from draftmark or draftmark.runtime"
        assert not suite or path.name == "contract.py", f"{path.name} imports {suite}, which engines do not install"


def test_the_decoding_loop_uses_the_public_api_only() -> None:
    """The decoding loop imports only the two public modules; its commands also import the command line's helpers."""
    folder = ROOT / "core" / "speculative" / "src" / "draftmark_speculative"
    for path in folder.rglob("*.py"):
        own = {name for name in imports(path) if name.split(".")[0] == "draftmark"}
        internal = {name for name in own - ALLOWED if "cli" not in path.relative_to(folder).parts}
        assert not internal, f"{path.name} imports {internal}: import the name from draftmark or draftmark.runtime"


@pytest.mark.parametrize("page", ["examples/engine.py", "docs/writing-a-backend.md"])
def test_printed_programs_use_the_public_api_only(page: str) -> None:
    """Programs printed in the documentation import the public modules and `draftmark_contract.layouts` only."""
    allowed = ALLOWED | {"draftmark_contract.layouts"}
    lines = (ROOT / page).read_text().splitlines()
    found = {line.split()[1] for line in lines if line.startswith(("from draftmark", "import draftmark"))}
    assert found <= allowed, found - allowed
    assert "draftmark" in found
