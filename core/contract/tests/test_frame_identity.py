"""Tests of code digests: code changes them, prose does not, and the list of modules that a step runs is complete."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import draftmark
from draftmark_contract.runner.code_digest import counts, digest_of, imports_of
from draftmark_contract.runner.identity import (
    IMPORTED_ONLY,
    JUDGING,
    STEP_PATH,
    Part,
    identity_of,
    parts_of,
    siblings_of,
)
from draftmark_contract.runner.source import CLEAN, COMMIT_VARIABLE, UNVERIFIED, source_of, verified

CORE = Path(draftmark.__file__).parent
CODE = '''
"""A module."""

LIMIT = 3
"""What it is."""


def served(n: int) -> bool:
    """Whether."""
    return n < LIMIT  # as measured
'''


def _digest(text: str, name: str = "a.py") -> str:
    return digest_of([(name, textwrap.dedent(text).encode())])


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("# as measured", "# as the vendor says"),
        lambda text: text.replace('"""Whether."""', '"""Whether n is served."""'),
        lambda text: text.replace('"""What it is."""\n', ""),
        lambda text: text.replace("n < LIMIT", "(n < LIMIT)").replace("\n\n\n", "\n\n"),
    ],
    ids=["comment", "docstring", "attribute's docstring", "layout"],
)
def test_prose_does_not_change_a_digest(edit: Callable[[str], str]) -> None:
    """A change of comments, docstrings or layout keeps the digest of the code."""
    assert edit(CODE) != CODE
    assert _digest(edit(CODE)) == _digest(CODE)


@pytest.mark.parametrize("old, new", [("< LIMIT", "<= LIMIT"), ("LIMIT = 3", "LIMIT = 4"), ("served", "serves")])
def test_code_changes_a_digest(old: str, new: str) -> None:
    """A changed operator, number or name changes the digest of the code."""
    assert _digest(CODE.replace(old, new)) != _digest(CODE)


def test_files_count_by_name_and_bytes() -> None:
    """The digest of a kernel's source includes its comments; contract.toml and documents do not count."""
    assert _digest("int a; // one", "k.cu") != _digest("int a; // two", "k.cu")
    assert _digest(CODE, "a.py") != _digest(CODE, "b.py")
    assert [
        name for name in ("contract.toml", "x/py.typed", "README.md", "x/__pycache__/a.pyc", "k.cu") if counts(name)
    ] == ["k.cu"]
    assert _digest("def broken(:", "a.py") == _digest("def broken(:", "a.py") != _digest("def brokem(:", "a.py")


def test_empty_string_in_nested_format_is_ignored() -> None:
    """Python 3.12 adds an empty string to some syntax trees; digests ignore it, so they equal those of Python 3.11."""
    plain = ast.parse('f"{a:<{b}}"')
    format_spec = plain.body[0].value.values[0].format_spec  # type: ignore[attr-defined]
    format_spec.values.append(ast.Constant(""))
    assert _digest('f"{a:<{b}}"') == _digest(ast.unparse(plain))


def _modules(name: str) -> list[Path]:
    path = CORE / name
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def _imported(path: Path) -> set[str]:
    """Return the core's modules that a file imports at run time, as the first name after `draftmark`."""
    package = [CORE.name, *path.relative_to(CORE).parent.parts]
    found = {name.split(".")[1] for name in imports_of(path.read_bytes()) if name.startswith(f"{CORE.name}.")}
    tree = ast.parse(path.read_bytes())
    hidden = {id(one) for node in ast.walk(tree) if _is_type_checking(node) for one in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in hidden:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found |= {base[1]} if len(base) > 1 else {alias.name for alias in node.names}
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_step_path_is_complete() -> None:
    """If a module of `STEP_PATH` imports a core module, that module is in `STEP_PATH` or in `IMPORTED_ONLY`."""
    files = {path: name for name in STEP_PATH for path in _modules(name)}
    assert all(path.is_file() for path in files), "a module of STEP_PATH is gone"
    missing = {name for path in files for name in _imported(path)} - {*STEP_PATH, *IMPORTED_ONLY}
    assert missing == set(), "add these to identity.STEP_PATH, or to IMPORTED_ONLY if no step runs them"


def test_verdict_depends_on_plugin_core_and_suite() -> None:
    """A verdict has digests of plugin, core and suite; code that only prints a verdict is in none of them."""
    loaded = draftmark.load("reference")
    parts = {part.name: part for part in parts_of(loaded)}
    assert set(parts) == set(identity_of(loaded)) == {"plugin", "core", "guard", "suite", "proof"}
    names = {name for name, _ in parts["suite"].files() if parts["suite"].has(name)}
    assert {"checks/numerics.py", "harness/harness.py", *JUDGING} <= names
    assert not {"cli/contract.py", "runner/report.py", "runner/verdict.py"} & names
    assert all(name.startswith(STEP_PATH) for name, _ in parts["core"].files())


def test_siblings_are_found_by_their_imports() -> None:
    """The reference imports no other backend; if a plugin imports another backend, that backend is found."""
    assert siblings_of(draftmark.load("reference")) == set()
    pytest.importorskip("draftmark_cuda_trtllm")
    assert siblings_of(draftmark.load("cuda_trtllm")) == {"cuda_triton"}


@pytest.fixture
def tree(tmp_path: Path) -> Part:
    """Return a plugin in a git repository with one commit."""
    (tmp_path / "src" / "plug").mkdir(parents=True)
    (tmp_path / "src" / "plug" / "__init__.py").write_text(CODE)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True)
    return Part("plugin", tmp_path / "src" / "plug")


def _file(part: Part) -> Path:
    return part.root / "__init__.py"


def test_clean_tree_is_proved(tree: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git tree with the code of its commit is recorded as clean, even if comments were changed."""
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    found = source_of([tree])
    assert (found["tree"], found["paths"]) == (CLEAN, {"plugin": "src/plug"})
    _file(tree).write_text(CODE.replace("as measured", "as the vendor says"))
    assert source_of([tree])["tree"] == CLEAN


def test_changed_tree_is_not_clean(tree: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git tree with an edited or untracked file is recorded as changed, even if DRAFTMARK_COMMIT names a commit."""
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    commit = source_of([tree])["commit"]
    (tree.root / "more.py").write_text("X = 1\n")
    assert source_of([tree])["tree"] == "changed: plugin"
    (tree.root / "more.py").unlink()
    _file(tree).write_text(CODE.replace("< LIMIT", "<= LIMIT"))
    assert source_of([tree])["tree"] == "changed: plugin"
    monkeypatch.setenv(COMMIT_VARIABLE, commit)
    assert source_of([tree])["tree"] == "changed: plugin"
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc")
    assert source_of([tree]) == {"commit": "0123abc", "tree": UNVERIFIED, "paths": {}}


def test_claimed_commit_is_checked_by_the_history(tree: Part, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For a copy without git history, the original history shows if the named commit contains the recorded code."""
    commit = source_of([tree])["commit"]
    copy = tmp_path_factory.mktemp("copy") / "plug"
    copy.mkdir()
    (copy / "__init__.py").write_text(CODE)
    part = Part("plugin", copy)
    assert source_of([part])["tree"] == UNVERIFIED
    record = {"source": {"commit": commit, "paths": {}}, "identity": {"plugin": part.digest()}}
    assert verified(record, [tree], tree.root)
    _file(part).write_text(CODE.replace("< LIMIT", "<= LIMIT"))
    record["identity"] = {"plugin": part.digest()}
    assert not verified(record, [tree], tree.root)
    assert not verified({**record, "source": {"commit": "0123abc", "paths": {}}}, [tree], tree.root)
