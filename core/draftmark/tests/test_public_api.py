"""What is public is written down: a change of the API is a change of one text file."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from public_api import FILE, MODULES, api_text

ROOT = Path(__file__).parents[3]
ALLOWED = {"draftmark", "draftmark.runtime"}
SIBLINGS = {"draftmark_cuda_triton.shared", "draftmark_cuda_triton.shared_sizing"}
"""What plugins may take from one another: the modules that promise to keep their names."""


def test_the_api_is_as_written_down() -> None:
    """A new, changed or lost name shows as a diff of public_api.txt."""
    command = "python core/draftmark/tests/public_api.py"
    assert api_text() == FILE.read_text(), f"the public API changed: run `{command}`, and tell CHANGELOG.md"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    """`__all__` is sorted, its names resolve, and each class and function says what it is."""
    module = importlib.import_module(name)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, type) or callable(value):
            assert (value.__doc__ or "").strip(), f"{name}.{public} has no docstring"


def test_the_two_modules_share_no_name() -> None:
    """A name has one home, so an import can be written without looking it up twice."""
    integers, tensors = (set(importlib.import_module(name).__all__) for name in MODULES)
    assert not integers & tensors


def imports(path: Path) -> set[str]:
    """Modules that a file imports, absolutely."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("folder", sorted(ROOT.glob("plugins/*/src/*/")), ids=lambda folder: folder.name)
def test_plugins_use_the_public_api_only(folder: Path) -> None:
    """A plugin imports the two public modules and a sibling's shared ones; the suite's only in its module contract."""
    for path in folder.rglob("*.py"):
        own = {name for name in imports(path) if name.split(".")[0].startswith("draftmark")}
        suite = {name for name in own if name.startswith("draftmark_contract")}
        strange = own - ALLOWED - SIBLINGS - suite - {folder.name}
        assert not strange, f"{path.name} imports {strange}: take the name from draftmark or draftmark.runtime"
        assert not suite or path.name == "contract.py", f"{path.name} imports {suite}, which an engine does not have"


def test_the_decoding_loop_uses_the_public_api_only() -> None:
    """An engine needs no more than the two public modules; its commands share the command line's helpers."""
    folder = ROOT / "core" / "speculative" / "src" / "draftmark_speculative"
    for path in folder.rglob("*.py"):
        own = {name for name in imports(path) if name.split(".")[0] == "draftmark"}
        internal = {name for name in own - ALLOWED if "cli" not in path.relative_to(folder).parts}
        assert not internal, f"{path.name} imports {internal}: take the name from draftmark or draftmark.runtime"


@pytest.mark.parametrize("page", ["docs/one-step.md", "docs/writing-a-backend.md"])
def test_printed_programs_use_the_public_api_only(page: str) -> None:
    """What a reader copies imports the two public modules, and of the suite what a contract module may."""
    allowed = ALLOWED | {"draftmark_contract.layouts"}
    lines = (ROOT / page).read_text().splitlines()
    found = {line.split()[1] for line in lines if line.startswith(("from draftmark", "import draftmark"))}
    assert found <= allowed, found - allowed
    assert "draftmark" in found
