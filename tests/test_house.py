"""Tests of the wheels' structure: no module imports itself through others, and none rebinds its variables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.docs.house import by_feature, wide
from tools.house import ROOT, circles_of, distributions, imports
from tools.walks import item_of, to_the_assertion, to_the_verdict

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
        if "global " in (text := path.read_text())  # Parsing every file takes seconds.
        for node in ast.walk(ast.parse(text))
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


@pytest.mark.parametrize("check", ["graphs.replay_equals_eager", "sizing.covers"])
def test_assertion_is_at_most_ten_files_from_a_check(check: str) -> None:
    """A reader of a check enters at most ten files of the suite until the output is compared, and the check is one."""
    files = to_the_assertion(item_of(check))
    assert f"checks/{check.partition('.')[0]}.py" in files and len(files) <= 10, files


@pytest.mark.slow
def test_verdict_is_at_most_ten_files_from_a_name() -> None:
    """The way from `draftmark contract NAME` to the printed verdict has at most ten files, the worker's among them."""
    files = to_the_verdict(item_of("sizing.covers"))
    assert {"cli/contract.py", "runner/worker.py", "runner/verdict.py"} <= set(files) and len(files) <= 10, files


def test_wide_function_is_found(tmp_path: Path) -> None:
    """A function with 21 parameters is counted, and a kernel is not. Ruff refuses such functions (PLR0913)."""
    many = ", ".join(f"a{n}" for n in range(21))
    file = tmp_path / "wide.py"
    file.write_text(f"def host({many}): ...\n\n@triton.jit\ndef kernel({many}): ...\n")
    assert wide(file) == 1


def test_each_file_counts_for_one_feature() -> None:
    """Lines are counted once: a mutant of recurrent state belongs to recurrent state."""
    counts = {"core/contract/tests/mutants/rules/state/slots.py": 5, "core/draftmark/src/draftmark/tree.py": 7}
    found = by_feature(counts)
    assert found["recurrent state"] == 5 and found["mutants"] == 0 and sum(found.values()) == 12


def test_layout_names_every_folder_of_core_and_suite() -> None:
    """Section 7 of docs/design.md draws each folder of the core and of the suite, and no module that does not exist."""
    drawn = (ROOT / "docs" / "design.md").read_text().partition("## 7. Layout")[2].split("```")[1]
    for folder, package in (("core/draftmark", "draftmark"), ("core/contract", "draftmark_contract")):
        [part] = re.findall(rf"^{folder}/ .*\n((?:  .*\n)+)", drawn, re.MULTILINE)
        names = {word for line in part.splitlines() for word in re.split(r"\s{3,}", line.strip())[0].split()}
        home = ROOT / folder / "src" / package
        inside = {f"{one.name}/" for one in home.iterdir() if one.is_dir() and one.name != "__pycache__"}
        assert inside <= names, inside - names
        gone = {one for one in names - inside if not (home / f"{one.removesuffix('.py')}.py").exists()}
        assert not gone, gone
